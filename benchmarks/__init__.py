"""Measures each promise of speed as a ratio to a peer or to the kernel's own floor, in the same run. `make bench`."""
