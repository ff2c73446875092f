"""Reading, unpacking and measuring untrusted archives and file trees in bounded memory, time and space."""
