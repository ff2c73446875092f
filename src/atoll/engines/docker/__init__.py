"""The `docker` engine: sandboxes as containers of a Docker engine, on this machine or another, hardened by us."""
