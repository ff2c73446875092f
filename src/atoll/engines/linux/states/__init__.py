"""Saved states of sandboxes: checkpoints, snapshots, their differences, and snapshots as files."""
