"""The `native` engine: the plan executed by a launcher of our own, with nothing between us and the kernel."""

from atoll.engines.linux.native.engine import NativeEngine

__all__ = ["NativeEngine"]
