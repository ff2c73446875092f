"""`atoll cp`: files between this machine and a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.target import on_sandbox
from atoll.errors import SpecError

if TYPE_CHECKING:
    from atoll.sandbox.sandbox import AsyncSandbox


def copy(
    source: Annotated[str, typer.Argument(help="A path on this machine, or ID:PATH in a sandbox.")],
    target: Annotated[str, typer.Argument(help="A path on this machine, or ID:PATH in a sandbox.")],
) -> None:
    """Copy files and directories into a sandbox or out of it."""
    into, out_of = _inside(target), _inside(source)
    if (into is None) == (out_of is None):
        raise SpecError("one of the two must be in a sandbox, as ID:PATH, the other here")
    place = into or out_of
    assert place is not None

    async def work(sandbox: AsyncSandbox) -> None:
        if into is not None:
            await sandbox.copy_to(source, into[1])
        else:
            await sandbox.copy_from(place[1], target)

    on_sandbox(place[0], work)


def _inside(text: str) -> tuple[str, str] | None:
    """Split `ID:PATH`; None for a path on this machine, which exists here or begins with `/` or `.`."""
    sandbox_id, colon, path = text.partition(":")
    if not colon or not sandbox_id or "/" in sandbox_id or text.startswith(".") or Path(text).exists():
        return None
    return sandbox_id, path or "."
