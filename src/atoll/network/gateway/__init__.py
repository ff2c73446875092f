"""The gateway process, which carries or refuses the traffic of all sandboxes of an installation."""
