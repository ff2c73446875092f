"""Images built from Dockerfiles: each step runs in a sandbox, and the state after it is kept."""
