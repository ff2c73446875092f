"""The gateway process: it carries the traffic of all sandboxes of an installation, or refuses to."""
