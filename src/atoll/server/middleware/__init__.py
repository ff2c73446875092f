"""What every request passes before its route: credentials and their end, limits, and turns of the event loop."""
