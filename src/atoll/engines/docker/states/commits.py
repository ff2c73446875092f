"""Saved states as images of the Docker engine.

The name of the repository contains the kind of state (`atoll-INSTALLATION-checkpoint`, `-snapshot`, `-origin`), the tag
is its id, and a label holds its description. An origin is kept only for the containers that were created from it. Tags
can change and labels cannot, so a checkpoint that is deleted while forks need it only gets another tag.

`docker commit` writes the container's configuration into the image, including its environment; all values that do not
come from the image are blanked. Some engines keep a second copy of that configuration. So only states that are deleted
with their sandbox are committed; a state that outlives it is stored as a file tree without any configuration
(`flatten`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from atoll.engines.docker.api.http import Http, RefusedError
from atoll.engines.docker.api.image_pull import Image
from atoll.engines.host.saved_states import StateRecord
from atoll.errors import EngineError
from atoll.model import ImageDefaults
from atoll.model.checkpoint import Checkpoint, Snapshot

Kind = Literal["checkpoint", "snapshot", "origin"]
LABEL = "atoll.saved"
SLOW_S = 1800.0


class SavedState(StateRecord):
    image: str
    """The image that the sandbox was created from, as its spec names it."""
    env: dict[str, str] = Field(default_factory=dict)
    """The variables of that image."""
    defaults: ImageDefaults = ImageDefaults()
    """What else that image says about sandboxes made from it."""
    image_id: str = ""
    """The id of the state's own image. It is not written down: the Docker engine knows it."""
    architecture: str = ""

    def as_checkpoint(self) -> Checkpoint:
        return Checkpoint(
            self.id, self.sandbox_id, self.name, self.created_at, self.parent, self.made_by, self.size_bytes
        )

    def as_snapshot(self) -> Snapshot:
        return Snapshot(self.name, self.created_at, self.image, self.image_id, self.size_bytes, self.source)

    def as_image(self) -> Image:
        return Image(self.image_id, self.architecture, self.env, defaults=self.defaults)

    def label(self) -> str:
        text = self.model_dump_json(exclude={"image_id", "architecture"})
        return base64.urlsafe_b64encode(text.encode()).decode()


_standing: set[str] = set()
"""Containers that are paused only while their state is saved."""


def stands_still(container: Mapping[str, Any]) -> bool:
    """Return whether a container is paused for a moment to save its state."""
    return str(container.get("Id")) in _standing


class Commits:
    def __init__(self, http: Http, installation: str) -> None:
        self._http = http
        self._prefix = f"atoll-{installation[:8]}"

    async def commit(self, container: Mapping[str, Any], saved: SavedState, kind: Kind) -> SavedState:
        """Save the state of a container, which is paused meanwhile."""
        config = container.get("Config") or {}
        blank = {str(entry).partition("=")[0] for entry in config.get("Env") or ()}
        own = {name: value for name, value in saved.env.items() if name in blank}
        labels = dict.fromkeys(config.get("Labels") or {}, "")
        body = {
            "Env": [f"{name}={own.get(name, '')}" for name in sorted(blank)],
            "Labels": {**labels, LABEL: saved.label()},
        }
        query = {"container": str(container["Id"]), "repo": self._repository(kind), "tag": saved.id, "pause": "1"}
        if not (container.get("State") or {}).get("Paused"):
            _standing.add(str(container["Id"]))
        try:
            answer = await self._http.call("POST", "/commit", query=query, body=body, timeout_s=SLOW_S)
        except RefusedError as error:
            raise EngineError(f"the Docker engine could not save the state: {error.message}") from error
        finally:
            _standing.discard(str(container["Id"]))
        return saved.model_copy(update={"image_id": str(answer["Id"])})

    async def flatten(self, pieces: AsyncIterator[bytes], saved: SavedState) -> SavedState:
        """Make a snapshot from a tar archive of a file tree."""
        query = {
            "fromSrc": "-",
            "repo": self._repository("snapshot"),
            "tag": saved.id,
            "changes": f'LABEL {LABEL}="{saved.label()}"',
        }
        try:
            async for line in self._http.send("/images/create", query, pieces, SLOW_S):
                if "error" in line:
                    raise EngineError(f"the Docker engine could not save the state: {str(line['error'])[:500]}")
        except RefusedError as error:
            raise EngineError(f"the Docker engine could not save the state: {error.message}") from error
        for found in await self.all("snapshot"):
            if found.id == saved.id:
                return found
        raise EngineError("the Docker engine reported that it saved the state, but it cannot be found")

    async def all(self, kind: Kind) -> list[SavedState]:
        """Return all states of a kind, oldest first."""
        query = {"filters": json.dumps({"reference": [self._repository(kind)]})}
        try:
            answer = await self._http.call("GET", "/images/json", query=query, timeout_s=SLOW_S)
        except RefusedError as error:
            raise EngineError(f"the Docker engine cannot list its images: {error.message}") from error
        found = [saved for entry in answer if (saved := _understood(entry)) is not None]
        return sorted(found, key=lambda saved: (saved.created_at, saved.id))

    async def hide(self, saved: SavedState) -> None:
        """Hide a deleted state, so that it is kept only for containers that need it."""
        query = {"repo": self._repository("origin"), "tag": saved.id}
        await self._ask("POST", f"/images/{saved.image_id}/tag", query)
        await self.untag(saved, "checkpoint")
        await self.untag(saved, "snapshot")

    async def untag(self, saved: SavedState, kind: Kind) -> None:
        """Remove a tag. An image without a tag is removed as soon as no container needs it."""
        await self._ask("DELETE", f"/images/{self._repository(kind)}:{saved.id}", {"force": "1"})

    async def _ask(self, method: str, path: str, query: Mapping[str, str]) -> None:
        try:
            await self._http.call(method, path, query=query, timeout_s=SLOW_S)
        except RefusedError as error:
            if error.status != 404:
                raise EngineError(f"the Docker engine cannot change an image: {error.message}") from error

    def _repository(self, kind: Kind) -> str:
        return f"{self._prefix}-{kind}"


def _understood(entry: Mapping[str, Any]) -> SavedState | None:
    text = (entry.get("Labels") or {}).get(LABEL, "")
    try:
        saved = SavedState.model_validate_json(base64.urlsafe_b64decode(text))
    except (ValueError, ValidationError):
        return None
    return saved.model_copy(update={"image_id": str(entry["Id"]), "architecture": ""})
