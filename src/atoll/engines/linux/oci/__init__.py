"""The `oci` engine: sandboxes by a standard container runtime, without a daemon. The runtime decides how strong the
wall is."""

from atoll.engines.linux.oci.engine import OciEngine

__all__ = ["OciEngine"]
