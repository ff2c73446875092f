"""Names of other systems, as thin faces of ours."""
