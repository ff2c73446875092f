"""`atoll logs`, `stats`, `events`: what sandboxes use, and what happened to them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.target import JsonOption, SandboxArgument, ask_server, on_sandbox, server_url, show

if TYPE_CHECKING:
    from atoll.sandbox.sandbox import AsyncSandbox


def logs(sandbox_id: SandboxArgument) -> None:
    """Show what happened to a sandbox, and why it ended if it has."""

    async def work(sandbox: AsyncSandbox) -> None:
        seen = await sandbox.inspect()
        print(" ".join(str(word) for word in (seen.state, seen.cause or "", seen.reason) if word))

    if server_url() is None:
        on_sandbox(sandbox_id, work)
        return

    found = ask_server("GET", "/events", params={"sandbox_id": sandbox_id, "limit": "1000"})["items"]
    for event in found:
        words = (event["at"], event["before"], "->", event["after"], event["cause"] or "", event["reason"])
        print(" ".join(word for word in words if word))


def stats(sandbox_id: SandboxArgument, as_json: JsonOption = False) -> None:
    """Show what a sandbox uses."""

    async def work(sandbox: AsyncSandbox) -> None:
        show([asdict(await sandbox.stats())], as_json)

    on_sandbox(sandbox_id, work)


def events(
    after: Annotated[int, typer.Option(help="Show only events with a higher number.")] = 0,
    limit: Annotated[int, typer.Option(help="Show at most this many.")] = 100,
    kind: Annotated[
        str | None, typer.Option(help="Show only events of this kind: state, port, health or callback.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to your sandboxes on the server."""
    found = ask_server("GET", "/events", params={"after": after, "limit": limit, **({"kind": kind} if kind else {})})[
        "items"
    ]
    columns = ("number", "at", "sandbox_id", "kind", "before", "after", "cause", "reason")
    show(found if as_json else [{name: event[name] for name in columns} for event in found], as_json)
