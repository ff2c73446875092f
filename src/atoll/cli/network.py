"""`atoll network log`, `atoll network set`, `atoll port-forward`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from atoll.cli.target import JsonOption, SandboxArgument, attach, print_json, show
from atoll.errors import SpecError

app = typer.Typer(help="What sandboxes may reach, and what was refused.", no_args_is_help=True)


@app.command("log")
def log(sandbox_id: SandboxArgument, as_json: JsonOption = False) -> None:
    """What was refused to a sandbox: when, where to, under which name, and by which rule."""

    async def work() -> None:
        sandbox = await attach(sandbox_id)
        try:
            found = await sandbox.network_log()
        finally:
            await sandbox.detach()
        if as_json:
            print_json([asdict(each) for each in found])
            return
        show(
            [{**asdict(each), "time": datetime.fromtimestamp(each.time).isoformat(" ", "seconds")} for each in found],
            False,
        )

    asyncio.run(work())


@app.command("set")
def set_policy(
    sandbox_id: SandboxArgument,
    policy: Annotated[
        str, typer.Argument(help="none, all, domains with commas between, or a policy in JSON.", metavar="POLICY")
    ],
) -> None:
    """Change what a sandbox may reach, while it runs. Ends what is no longer allowed."""

    async def work() -> None:
        sandbox = await attach(sandbox_id)
        try:
            await sandbox.set_network(read_policy(policy))
        finally:
            await sandbox.detach()

    asyncio.run(work())


def port_forward(
    sandbox_id: SandboxArgument,
    ports: Annotated[str, typer.Argument(help="LOCAL:PORT, or PORT for the same.", metavar="LOCAL:PORT")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
) -> None:
    """Let a port of this machine lead to a port inside a sandbox, until Ctrl-C. Needs no network inside."""
    local, _, inside = ports.rpartition(":")
    if not inside.isdigit() or not (local or inside).isdigit():
        raise SpecError(f"'{ports}' are not ports", hint="Write LOCAL:PORT, for example 8080:80.")

    async def work() -> None:
        sandbox = await attach(sandbox_id)
        try:
            async with await sandbox.expose(int(inside), int(local or inside), host=host) as forward:
                print(f"{forward.address[0]}:{forward.address[1]} -> {inside}", flush=True)
                await asyncio.Event().wait()
        finally:
            await sandbox.detach()

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def read_policy(text: str) -> Any:
    """As it is written on a command line."""
    if text in ("none", "all"):
        return text
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise SpecError(f"the policy is not JSON: {error}") from error
    return {"allowed_domains": [each.strip() for each in text.split(",") if each.strip()]}
