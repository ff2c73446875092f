"""Sandboxes made of Linux namespaces: the plan that all such engines execute, and what it needs of the host."""
