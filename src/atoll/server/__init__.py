"""The service over HTTP: REST and WebSockets under /api/v1. Routes, credentials and limits; no logic of its own."""

from atoll.server.app import make_app
from atoll.server.settings import ServerSettings

__all__ = ["ServerSettings", "make_app"]
