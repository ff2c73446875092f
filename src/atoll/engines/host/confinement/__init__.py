"""Which system calls a sandbox may make, and which files of the kernel it sees: lists as data, and their filter."""
