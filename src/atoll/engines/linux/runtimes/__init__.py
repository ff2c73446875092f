"""The `oci` engine: sandboxes made by a standard OCI runtime, without a daemon.

The OCI runtime determines the isolation level.
"""
