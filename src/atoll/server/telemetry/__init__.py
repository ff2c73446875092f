"""Telemetry of programs in sandboxes, on its way through the server to the operator's collector."""
