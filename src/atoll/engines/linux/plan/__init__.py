"""What a sandbox is made of, as data: mounts, ids, limits and walls. The launchers only carry it out."""
