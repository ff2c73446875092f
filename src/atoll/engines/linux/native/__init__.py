"""The `native` engine: the plan executed by a launcher of our own, with nothing between us and the kernel."""
