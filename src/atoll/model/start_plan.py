"""What runs in a sandbox from its creation on: what its spec says, and otherwise the labels of its image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from atoll.errors import SpecError
from atoll.model.spec import SandboxSpec
from atoll.model.starting import ReadyCheck, StartCommand, StartCommands

START_LABEL, READY_LABEL, SUDO_LABEL = "atoll.start", "atoll.ready", "atoll.sudo"
BUILD_LABEL = "atoll.build"
"""The label of sandboxes that build images. What an image starts must not change what is built from it."""
_COMMANDS: TypeAdapter[tuple[StartCommand, ...]] = TypeAdapter(StartCommands)
_READY: TypeAdapter[ReadyCheck] = TypeAdapter(ReadyCheck)
_TEXT = ("[", "{", '"')


@dataclass(frozen=True, slots=True)
class StartPlan:
    start: tuple[StartCommand, ...]
    ready: ReadyCheck | None
    sudo: bool

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to start or to wait for."""
        return bool(self.start) or self.ready is not None

    @property
    def ready_s(self) -> float:
        """How long the sandbox may take to become ready."""
        return self.ready.timeout_s if self.ready is not None else 0.0


def start_plan(spec: SandboxSpec, labels: Mapping[str, str]) -> StartPlan:
    """Return what a sandbox of this spec starts, where `labels` are those of its image.

    A spec with `start`, also with an empty one, sets the image's `start` and `ready` aside. Images are not trusted:
    their commands run only inside. Raises SpecError for a label that is invalid.
    """
    if BUILD_LABEL in spec.labels:
        return StartPlan((), None, False)
    start, ready, sudo = spec.start, spec.ready, spec.sudo
    if start is None:
        start = _of_label(labels, START_LABEL, _COMMANDS) or ()
        ready = ready or _of_label(labels, READY_LABEL, _READY)
    if sudo is None:
        sudo = labels.get(SUDO_LABEL) == "true"
    return StartPlan(start, ready, sudo)


def _of_label(labels: Mapping[str, str], label: str, kind: TypeAdapter[Any]) -> Any:
    text = labels.get(label)
    if text is None:
        return None
    try:
        return kind.validate_python(json.loads(text) if text.startswith(_TEXT) else text)
    except (ValueError, RecursionError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise SpecError(
            f"the label '{label}' of the image is invalid: {first[:200]}",
            hint="Give start=[] to set it aside, or correct the image.",
        ) from None
