"""The `oci` engine: sandboxes by a standard container runtime, without a daemon.

The runtime decides how strong the walls are.
"""
