"""What is asked of the class, because it concerns no single sandbox: lists of sandboxes, and snapshots."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from atoll.engines.checkpointing import Checkpointing
from atoll.engines.contract import Engine, Listing, checkpointing
from atoll.errors import EngineUnavailableError, SandboxNotFoundError
from atoll.model import ListedSandbox
from atoll.model.checkpoint import Snapshot
from atoll.sandbox.sandbox_access import EngineChoice
from atoll.settings import Settings


class ClassMethods:
    """The methods of the class `AsyncSandbox`. `engine`, `server` and `api_key` say where to look, as for `attach`."""

    # Inside the class `list` is the method, so the type is `builtins.list`.

    @classmethod
    async def snapshots(
        cls,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[Snapshot]:
        """Return all snapshots, which `snapshot` of a sandbox makes. New sandboxes start from one with
        `image="snapshot:NAME"`."""
        async with _keeper(EngineChoice(engine, server, api_key, settings or Settings.load())) as keeper:
            return [*await keeper.snapshots()]

    @classmethod
    async def delete_snapshot(
        cls,
        name: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Delete a snapshot. Sandboxes that were made from it are not affected."""
        async with _keeper(EngineChoice(engine, server, api_key, settings or Settings.load())) as keeper:
            await keeper.delete_snapshot(name)

    @classmethod
    async def export_snapshot(
        cls,
        name: str,
        path: str | Path,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Write a snapshot to a file of this machine, for another machine."""
        async with _keeper(EngineChoice(engine, server, api_key, settings or Settings.load())) as keeper:
            await keeper.export_snapshot(name, Path(path))

    @classmethod
    async def import_snapshot(
        cls,
        path: str | Path,
        name: str,
        *,
        memory: bool = False,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Snapshot:
        """Take over a file that `export_snapshot` wrote, under this name. The file is checked first.

        With `memory`, also take over its saved memory; do that only with files that you trust.
        """
        async with _keeper(EngineChoice(engine, server, api_key, settings or Settings.load())) as keeper:
            return await keeper.import_snapshot(Path(path), name, memory=memory)

    @classmethod
    async def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[ListedSandbox]:
        """Return the sandboxes of this machine, or those of the caller on a server, oldest first; with `labels`, only
        those that have them.

        `auto` stands for all engines that work on this machine.
        """
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        wanted = (labels or {}).items()
        return [each for each in await listed(choice) if wanted <= each.labels.items()]


def _skip(engine: str, error: EngineUnavailableError) -> None:
    """An engine that is not available here has no sandboxes here."""


async def listed(
    choice: EngineChoice, on_unavailable: Callable[[str, EngineUnavailableError], None] = _skip
) -> list[ListedSandbox]:
    """Return the sandboxes of an engine or, for `auto`, of all engines, oldest first. `on_unavailable` is told which of
    them could not be asked."""
    found: list[ListedSandbox] = []
    for each in choice.everywhere():
        try:
            async with _engine(each) as engine:
                found += await _listed_by(engine)
        except EngineUnavailableError as error:
            if choice.name != "auto":
                raise
            on_unavailable(each.name, error)
    return sorted(found, key=lambda each: each.created_at)


async def _listed_by(engine: Engine) -> list[ListedSandbox]:
    if isinstance(engine, Listing):
        return [*await engine.listing()]
    found = []
    for handle in await engine.list():
        try:
            seen = await engine.inspect(handle)
        except SandboxNotFoundError:
            continue  # it ended after it was listed
        found.append(ListedSandbox.of(handle, seen))
    return found


@asynccontextmanager
async def _keeper(choice: EngineChoice) -> AsyncIterator[Checkpointing]:
    """Yield the engine that keeps the snapshots. `auto` is the strongest engine here; `native` and `oci` share them."""
    async with _engine(choice) as engine:
        yield await checkpointing(engine)


@asynccontextmanager
async def _engine(choice: EngineChoice) -> AsyncIterator[Engine]:
    try:
        yield await choice.engine(None)
    finally:
        choice.release()
