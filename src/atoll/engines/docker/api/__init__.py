"""The Docker API: its HTTP, its objects, and what an engine can do."""
