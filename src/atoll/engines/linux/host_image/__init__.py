"""The image `host`: this machine's own programs, with copies of the files that every process maps."""
