"""Copying the results of a sandbox to the host before it is deleted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.errors import SandboxTimeoutError, SpecError

_ALL_OF_IT = "/*"
_NOT_PLAIN = frozenset("*?[\0")


class CopySource(Protocol):
    """The part of a sandbox that an export needs."""

    @property
    def id(self) -> str: ...

    async def copy_from(
        self, source: str, target: str | Path, *, max_bytes: int | None = None, max_items: int | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Export:
    """What is copied to which directory, and the maximum amount.

    The amount is bounded because untrusted code in the sandbox decides what is there.
    """

    target: str | Path
    """A directory of the host. It is created if it is missing."""
    source: str = "/output"
    """A directory or file of the sandbox; `/output/*` is the content of `/output`. It need not exist."""
    max_bytes: int = 1 << 30
    max_items: int = 100_000
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not isinstance(self.target, str | Path) or not str(self.target) or "\0" in str(self.target):
            raise SpecError(f"{str(self.target)!r} is not a directory to export to")
        if not isinstance(self.source, str) or not self.directory or set(self.directory) & _NOT_PLAIN:
            raise SpecError(
                f"{self.source!r} cannot be exported",
                hint="Name one directory or file, such as '/output' or '/output/*'.",
            )
        for name in ("max_bytes", "max_items", "timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise SpecError(f"{name} must be a number greater than 0, not {value!r}")

    @classmethod
    def of(cls, wanted: Export | str | Path) -> Export:
        return wanted if isinstance(wanted, Export) else cls(wanted)

    @property
    def directory(self) -> str:
        return self.source.removesuffix(_ALL_OF_IT)

    async def run(self, sandbox: CopySource) -> None:
        """Copy the source, if it exists. Raises SandboxResourceError beyond a bound, SandboxTimeoutError after
        `timeout_s`, and PartialCopyError if some files, such as sockets, cannot be copied."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await sandbox.copy_from(self.directory, self.target, max_bytes=self.max_bytes, max_items=self.max_items)
        except FileNotFoundError as error:
            if error.filename not in (None, self.directory):
                raise
        except TimeoutError as error:
            if isinstance(error, SandboxTimeoutError):
                raise
            raise SandboxTimeoutError(
                f"exporting {self.directory!r} of sandbox {sandbox.id} took longer than {self.timeout_s:g} s",
                hint="The sandbox is still there. Give a longer timeout_s, or delete it without the export.",
            ) from None
