"""The plan of a sandbox as plain data: mounts, ids, limits and isolation. The launchers only carry it out."""
