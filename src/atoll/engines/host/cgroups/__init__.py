"""Control groups: those of sandboxes, and above them one for the installation and one for each account."""
