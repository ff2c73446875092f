"""The `native` engine: plans are carried out by Atoll's own launcher, without an OCI runtime."""
