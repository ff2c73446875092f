"""Saved states of containers, as images of the Docker engine."""
