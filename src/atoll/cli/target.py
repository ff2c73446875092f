"""Where commands work: on a server if ATOLL_URL or --server names one, otherwise on this machine. And how
they show what they found there."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from atoll.errors import ConflictError, EngineUnavailableError, SandboxError, SandboxNotFoundError
from atoll.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from atoll.engines.contract import Engine
    from atoll.model import Handle
    from atoll.sandbox.sandbox import AsyncSandbox

T = TypeVar("T")
_LISTED = "`atoll ls` lists them."
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
SandboxArgument = Annotated[
    str, typer.Argument(help="The id of the sandbox, its name or its task; `atoll ls` lists them.", metavar="ID")
]


def server_url() -> str | None:
    return os.environ.get("ATOLL_URL") or None


def the_server() -> Any:
    """Return the server's engine. Raises SandboxError if no server is named."""
    if server_url() is None:
        raise SandboxError(
            "this needs a server", hint="Set ATOLL_URL and ATOLL_API_KEY, or start one here with `atoll serve`."
        )
    from atoll.engines import registry
    from atoll.settings import Settings

    return registry.remote(Settings.load(), None, None)


@asynccontextmanager
async def open_server() -> AsyncIterator[Any]:
    """Yield the server's engine, and close it. Raises SandboxError if no server is named."""
    server = the_server()
    try:
        yield server
    finally:
        await server.aclose()


def ask_server(method: str, path: str, **options: Any) -> Any:
    """Return the answer to one request. Raises SandboxError if no server is named."""

    async def ask() -> Any:
        async with open_server() as server:
            return await server.call(method, path, **options)

    return asyncio.run(ask())


def list_from_server(path: str, **params: str) -> list[Any]:
    """Return all items of one of the server's lists. Raises SandboxError if no server is named."""

    async def ask() -> list[Any]:
        async with open_server() as server:
            found: list[Any] = await server.items(path, **params)
            return found

    return asyncio.run(ask())


async def attach(sandbox_id: str) -> AsyncSandbox:
    """Attach to an existing sandbox of the server, or of whichever engine of this machine has it."""
    from atoll.sandbox.sandbox import AsyncSandbox

    if server_url() is not None:
        try:
            return await AsyncSandbox.attach(sandbox_id)
        except SandboxNotFoundError as error:
            error.hint = _LISTED
            raise
    engine, handle = called(sandbox_id, await everything())
    return await AsyncSandbox.attach(handle.sandbox_id, engine=engine)


@asynccontextmanager
async def attached(sandbox_id: str) -> AsyncIterator[AsyncSandbox]:
    """Attach to an existing sandbox for the duration of the block. The sandbox continues afterwards."""
    sandbox = await attach(sandbox_id)
    try:
        yield sandbox
    finally:
        await sandbox.detach()


def on_sandbox(sandbox_id: str, work: Callable[[AsyncSandbox], Awaitable[T]]) -> T:
    """Call `work` with an existing sandbox, in an event loop of its own."""

    async def whole() -> T:
        async with attached(sandbox_id) as sandbox:
            return await work(sandbox)

    return asyncio.run(whole())


def called(text: str, found: Sequence[tuple[Engine, Handle]]) -> tuple[Engine, Handle]:
    """Return the sandbox with that id, name or task, tried in this order.

    Raises SandboxNotFoundError, or ConflictError if several have that name or task.
    """
    from atoll.model.manus_names import TASK_LABEL

    labels = ("atoll.name", TASK_LABEL)
    for matching in (
        [each for each in found if each[1].sandbox_id == text],
        *([each for each in found if each[1].spec.labels.get(label) == text] for label in labels),
    ):
        if len(matching) > 1:
            ids = ", ".join(handle.sandbox_id for _, handle in matching[:5])
            raise ConflictError(f"{text!r} stands for {len(matching)} sandboxes", hint=f"Name one by its id: {ids}.")
        if matching:
            return matching[0]
    raise SandboxNotFoundError(f"Sandbox {text} not found", hint=_LISTED)


async def everything() -> list[tuple[Engine, Handle]]:
    """Return all sandboxes of this machine with their engines, which are closed when the event loop ends. Engines that
    are unavailable here are skipped."""
    from atoll.engines import leases, registry
    from atoll.settings import Settings

    settings = Settings.load()
    found: list[tuple[Engine, Handle]] = []
    for name in registry.names():
        with suppress(EngineUnavailableError):  # an engine that is unavailable has no sandboxes here
            engine = (await leases.acquire(name, settings)).engine
            found += [(engine, handle) for handle in await engine.list()]
    return found


def show(rows: Sequence[Mapping[str, object]], as_json: bool) -> None:
    """Print rows as a table for people or as JSON for programs."""
    if as_json:
        print_json(list(rows))
        return
    if not rows:
        print("nothing found", file=sys.stderr)
        return
    from rich.console import Console

    table = plain_table(*(column.replace("_", " ") for column in rows[0]))
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200).print(table)


def plain_table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    for column in columns:
        table.add_column(column, header_style="bold")
    return table


def size(count: int) -> str:
    """Return a number of bytes as people read it."""
    for unit_bytes, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit_bytes:
            return f"{count / unit_bytes:.1f} {unit}"
    return f"{count} B"


def age(since: float) -> str:
    """Return the age of something made at that time, as people read it."""
    seconds = time.time() - since
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def iso_time(at: float) -> str:
    """Return a time as programs read it, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def local_time(text: str) -> str:
    """Return an ISO time as people read it, in their time zone, to the second."""
    return datetime.fromisoformat(text).astimezone().isoformat(" ", "seconds")[:19]


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, default=str))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    # Text from a sandbox or a server may contain control sequences, which the terminal must not obey.
    return printable(str(value))
