"""What a server keeps of builds: a record and a log for each, in a directory of its own.

    builds/<id>/record.json     what is shown of it, replaced as a whole whenever its state changes
    builds/<id>/log             a line of JSON for each event, only ever appended to

Values of arguments and secrets are in neither. After a crash the log may end in the middle of a line, which is left
out; the next line begins on its own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from atoll import durable
from atoll.removal import remove_tree
from atoll.service.models.image_build import ImageBuildInfo

_RECORD, _LOG = "record.json", "log"
_PIECE = 64 << 10
_MAX_TEXT = 16 << 10
_MAX_LINE = 6 * _MAX_TEXT + 4096
_MAX_EVENTS = 1000
_EXTRA = 1 << 20
"""How much more than its output a log may hold: the steps, whose number is bounded by that of the instructions."""


class StoredBuild(BaseModel):
    """A build as it is stored."""

    info: ImageBuildInfo
    key: str = ""
    """The idempotency key of its request."""
    fingerprint: str = ""
    """What was requested under this key."""


class BuildRecords:
    """The directory of the builds. Its methods block for a moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[StoredBuild]:
        """Return all builds, and remove what is left of those that were never acknowledged."""
        found = []
        for place in list(self._folder.iterdir()):
            try:
                found.append(StoredBuild.model_validate_json((place / _RECORD).read_bytes()))
            except (OSError, ValidationError):
                remove_tree(place)
        return found

    def add(self, build: StoredBuild) -> None:
        (self._folder / build.info.id).mkdir(mode=0o700)
        self.store(build)

    def store(self, build: StoredBuild) -> None:
        durable.write(self._folder / build.info.id / _RECORD, build.model_dump_json())

    def remove(self, build_id: str) -> None:
        remove_tree(self._folder / build_id)

    def open_log(self, build_id: str, max_bytes: int) -> BuildLog:
        return BuildLog(self._folder / build_id / _LOG, max_bytes)


class BuildLog:
    """The log of one build. When its output has reached the limit, the rest is dropped and counted."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self.size = self._whole_size()
        self.dropped_bytes = 0

    def write(self, event: Mapping[str, Any]) -> None:
        """Append an event. Long output becomes several events; other long texts are cut."""
        text = str(event.get("text", ""))
        is_output = event["type"] == "output"
        for start in range(0, len(text) if is_output else 1, _MAX_TEXT):
            part = text[start : start + _MAX_TEXT]
            line = json.dumps({**event, "text": part}).encode() + b"\n"
            if self.size + len(line) <= self._max_bytes + (0 if is_output else _EXTRA):
                self._append(line)
                continue
            if is_output and not self.dropped_bytes:
                self._append(b'{"type": "dropped", "text": "the log is full: further output is dropped"}\n')
            self.dropped_bytes += len(part)

    def read(self, offset: int) -> list[tuple[dict[str, Any], int]]:
        """Return some events that begin at this offset or later, each with the offset behind it."""
        offset = min(offset, self.size)
        with self._path.open("rb") as file:
            if offset > 0:
                file.seek(offset - 1)
                offset += len(file.readline()) - 1  # an offset within a line means the next one
            file.seek(offset)
            data = file.read(min(_PIECE + _MAX_LINE, max(0, self.size - offset)))
        found = []
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            with contextlib.suppress(ValueError):  # a line that a crash cut off
                found.append((dict(json.loads(line)), offset))
            if len(found) >= _MAX_EVENTS:
                break
        return found

    def events(self) -> Iterator[dict[str, Any]]:
        offset = 0
        while found := self.read(offset):
            yield from (event for event, _ in found)
            offset = found[-1][1]

    def _append(self, line: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while line:
                written = os.write(fd, line)
                self.size, line = self.size + written, line[written:]
        finally:
            os.close(fd)

    def _whole_size(self) -> int:
        try:
            data_size = self._path.stat().st_size
        except FileNotFoundError:
            self._path.touch(0o600)
            return 0
        with self._path.open("rb+") as file:
            file.seek(max(0, data_size - _PIECE - _MAX_TEXT * 6))
            if (tail := file.read()) and not tail.endswith(b"\n"):
                file.truncate(data_size - len(tail) + tail.rfind(b"\n") + 1)
        return self._path.stat().st_size
