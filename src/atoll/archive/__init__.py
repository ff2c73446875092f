"""Archives and file trees that strangers made: read, unpacked and measured in bounded memory, time and space."""
