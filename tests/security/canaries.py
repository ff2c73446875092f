"""Texts that are on the host or in a neighbour, and that no sandbox may ever put out."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from atoll.guest.files import FileInfo
from atoll.model import ExecutionResult
from atoll.sandbox.sandbox import AsyncSandbox


@dataclass(slots=True)
class Canaries:
    places: dict[str, str] = field(default_factory=dict)
    """Canary → where it is."""

    def new(self, place: str) -> str:
        canary = secrets.token_hex(16)
        self.places[canary] = place
        return canary

    def found_in(self, data: bytes) -> list[str]:
        return [place for canary, place in self.places.items() if canary.encode() in data]

    def search(self, data: bytes) -> None:
        assert self.found_in(data) == [], "a sandbox put out a secret"


class WatchedSandbox(AsyncSandbox):
    """A sandbox of which every byte that comes out is searched for every canary."""

    canaries: Canaries

    async def exec(self, *arguments: Any, **options: Any) -> ExecutionResult:
        result = await super().exec(*arguments, **options)
        self.canaries.search(result.stdout_bytes + result.stderr_bytes)
        return result

    async def read_bytes(self, *arguments: Any, **options: Any) -> bytes:
        data = await super().read_bytes(*arguments, **options)
        self.canaries.search(data)
        return data

    async def list_files(self, *arguments: Any, **options: Any) -> list[FileInfo]:
        found = await super().list_files(*arguments, **options)
        self.canaries.search(repr(found).encode(errors="surrogateescape"))
        return found

    async def walk(self, *arguments: Any, **options: Any) -> AsyncIterator[FileInfo]:
        async for info in super().walk(*arguments, **options):
            self.canaries.search(repr(info).encode(errors="surrogateescape"))
            yield info
