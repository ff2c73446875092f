"""`atoll logs`, `stats`, `events`: what sandboxes use, and what happened to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.target import (
    JsonOption,
    SandboxArgument,
    ask_server,
    local_time,
    on_sandbox,
    print_json,
    server_url,
    show,
    size,
)
from atoll.printable import printable

if TYPE_CHECKING:
    from atoll.sandbox.sandbox import AsyncSandbox


def logs(sandbox_id: SandboxArgument, as_json: JsonOption = False) -> None:
    """Show what happened to a sandbox, and why it ended if it has."""

    async def work(sandbox: AsyncSandbox) -> None:
        seen = await sandbox.inspect()
        if as_json:
            print_json([{"state": seen.state, "cause": seen.cause, "reason": seen.reason}])
        else:
            print(" ".join(str(word) for word in (seen.state, seen.cause or "", seen.reason) if word))

    if server_url() is None:
        on_sandbox(sandbox_id, work)
        return
    found = ask_server("GET", "/events", params={"sandbox_id": sandbox_id, "limit": "1000"})["items"]
    if as_json:
        print_json(found)
        return
    for event in found:
        words = (local_time(event["at"]), event["before"], "->", event["after"], event["cause"] or "", event["reason"])
        print(" ".join(printable(word) for word in words if word))


def stats(sandbox_id: SandboxArgument, as_json: JsonOption = False) -> None:
    """Show what a sandbox uses, and the limits of that."""

    async def work(sandbox: AsyncSandbox) -> None:
        used, limits = await sandbox.stats(), (await sandbox.info()).limits
        if as_json:
            show([asdict(used)], True)
            return
        row = {
            "memory": _of(used.memory_bytes, limits.memory_bytes, size),
            "cpu time": None if used.cpu_s is None else f"{used.cpu_s:.1f} s",
            "cpus": limits.cpus,
            "processes": _of(used.pids, limits.pids, str),
            "disk": _of(used.disk_bytes, limits.disk_bytes, size),
        }
        show([row], False)

    on_sandbox(sandbox_id, work)


def _of(used: int | None, limit: int | None, written: Callable[[int], str]) -> str:
    """Return what is used of what is allowed."""
    known = "?" if used is None else written(used)
    return known if limit is None else f"{known} of {written(limit)}"


def events(
    after: Annotated[int, typer.Option(help="Show only events with a higher number.")] = 0,
    limit: Annotated[int, typer.Option(help="Show at most this many.")] = 100,
    kind: Annotated[
        str | None, typer.Option(help="Show only events of this kind: state, port, health or callback.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to your sandboxes on the server."""
    query = {"after": after, "limit": limit, **({"kind": kind} if kind else {})}
    found = ask_server("GET", "/events", params=query)["items"]
    show(found if as_json else [_shown(event) for event in found], as_json)


def _shown(event: Mapping[str, Any]) -> dict[str, Any]:
    columns = ("number", "at", "sandbox_id", "kind", "before", "after", "cause", "reason")
    return {name: local_time(event[name]) if name == "at" else event[name] for name in columns}
