"""Signed posts that tell other servers what happens to their sandboxes."""
