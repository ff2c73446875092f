"""Images built from Dockerfiles: each step runs in a sandbox, and the state after it is kept."""

from __future__ import annotations

from atoll.builds.builder import Builder
from atoll.builds.labels import sweep
from atoll.builds.request import BuildEvent, BuildRequest, BuiltImage, OnBuildEvent, Supplies

__all__ = ["BuildEvent", "BuildRequest", "Builder", "BuiltImage", "OnBuildEvent", "Supplies", "sweep"]
