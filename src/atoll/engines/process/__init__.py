"""The `process` engine: bubblewrap over this machine's own `/usr`. For development, and where nothing else works."""

from atoll.engines.process.engine import ProcessEngine

__all__ = ["ProcessEngine"]
