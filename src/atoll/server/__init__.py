"""The service over HTTP: REST and WebSockets under /api/v1. Routes, credentials and limits; no logic of its own."""
