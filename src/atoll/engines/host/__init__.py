"""What engines on this machine share: processes, sockets, deadlines, control groups, system call filters.

No engine is in it.
"""
