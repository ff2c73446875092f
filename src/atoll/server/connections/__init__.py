"""Connections of clients: accepted, bounded, streamed to, and ended when the client is gone."""
