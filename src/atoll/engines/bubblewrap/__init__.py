"""The `process` engine: bubblewrap over this machine's own `/usr`. For development, and where nothing else works."""
