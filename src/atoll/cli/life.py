"""`atoll create`, `exec`, `cp`, `stats`, `pause`, `resume`, `logs`: sandboxes that stay."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import (
    CpusOption,
    DiskOption,
    EngineOption,
    EnvOption,
    ImageOption,
    MemoryOption,
    NetworkOption,
    PidsOption,
    SetupOption,
    TaskOption,
    VolumeOption,
    make_sandbox,
)
from atoll.cli.ports import PortOption, named_ports
from atoll.cli.run import relay, stopped_by_signals
from atoll.cli.spec_file import FileOption
from atoll.cli.target import JsonOption, SandboxArgument, attach, print_json, server_url, show, the_server
from atoll.command import AsyncCommand
from atoll.errors import SpecError
from atoll.sandbox import AsyncSandbox


def create(
    engine: EngineOption = "auto",
    image: ImageOption = "host",
    memory: MemoryOption = None,
    cpus: CpusOption = None,
    pids: PidsOption = None,
    env: EnvOption = None,
    volume: VolumeOption = None,
    network: NetworkOption = "none",
    disk: DiskOption = None,
    setup: SetupOption = None,
    task: TaskOption = None,
    port: PortOption = None,
    spec: Annotated[str | None, typer.Option(help="A spec of the server's catalogue instead.")] = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a sandbox that stays until it is removed, and print its id."""

    ports = named_ports(port)

    async def work() -> None:
        if spec is not None:
            server = the_server()
            listed = [{"name": name, "port": number} for name, number in ports.items()]
            body = {"sandbox_spec_id": spec, "exposed_ports": listed, **({"task_id": task} if task is not None else {})}
            info = await server.call("POST", "/sandboxes", safe=False, json=body)
            await server.aclose()
            id = str(info["id"])
        else:
            made = make_sandbox(
                *(engine, image, memory, cpus, pids, env, volume, network),
                disk=disk,
                setup=setup,
                task=task,
                file=file,
                ports=ports,
            )
            sandbox = await made.create()
            id = sandbox._created().details.get("remote_id", sandbox.id)
            await sandbox.detach()
        if as_json:
            print_json({"id": id})
        else:
            print(id)

    asyncio.run(work())


def execute(
    sandbox_id: SandboxArgument,
    command: Annotated[
        list[str], typer.Argument(help="The program and its arguments, after `--`.", metavar="-- COMMAND...")
    ],
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds until it is killed.")] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help="Where it starts.")] = None,
    env: EnvOption = None,
) -> None:
    """Run a command in a sandbox that exists: its input, output and exit code are this program's own."""
    variables = dict(text.partition("=")[::2] for text in env or ())

    async def work() -> int:
        sandbox = await attach(sandbox_id)
        try:
            seconds = math.inf if timeout is None else timeout
            running = await sandbox.start(command, timeout=seconds, cwd=cwd, env=variables, stdin=True)
            return await _until_stopped(running)
        finally:
            await sandbox.detach()

    raise SystemExit(asyncio.run(work()))


async def _until_stopped(running: AsyncCommand) -> int:
    """Its exit code. The sandbox goes on without us, so a command that is given up is ended."""
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []
    with stopped_by_signals(task, received):
        try:
            return await relay(running)
        except asyncio.CancelledError:
            await running.kill()
            if not received:
                raise
            return 128 + received[0]


def copy(
    source: Annotated[str, typer.Argument(help="A path here, or ID:PATH in a sandbox.")],
    target: Annotated[str, typer.Argument(help="A path here, or ID:PATH in a sandbox.")],
) -> None:
    """Copy files and directories into a sandbox or out of it."""
    into, out_of = _inside(target), _inside(source)
    if (into is None) == (out_of is None):
        raise SpecError("one of the two must be in a sandbox, as ID:PATH, the other here")
    place = into or out_of
    assert place is not None

    async def work() -> None:
        sandbox = await attach(place[0])
        try:
            if into is not None:
                await sandbox.copy_to(source, into[1])
            else:
                await sandbox.copy_from(place[1], target)
        finally:
            await sandbox.detach()

    asyncio.run(work())


def stats(sandbox_id: SandboxArgument, as_json: JsonOption = False) -> None:
    """Show what a sandbox uses."""

    async def work(sandbox: AsyncSandbox) -> None:
        show([asdict(await sandbox.stats())], as_json)

    _with(sandbox_id, work)


def pause(
    sandbox_id: SandboxArgument,
    disk: Annotated[bool, typer.Option("--disk", help="Without using memory; needs --isolation gvisor.")] = False,
) -> None:
    """Stop a sandbox's processes where they are."""
    _with(sandbox_id, lambda sandbox: sandbox.pause(memory="disk" if disk else "ram"))


def resume(sandbox_id: SandboxArgument) -> None:
    """Let them go on."""
    _with(sandbox_id, lambda sandbox: sandbox.resume())


def keep_alive(
    sandbox_id: SandboxArgument,
    seconds: Annotated[float, typer.Argument(help="How long, counted from now; at most a day.", min=1, max=86400)],
) -> None:
    """Count a sandbox as in use for a while, so that it is neither ended nor paused for being idle."""
    _with(sandbox_id, lambda sandbox: sandbox.keep_alive(seconds))


def logs(sandbox_id: SandboxArgument) -> None:
    """Show what happened to a sandbox, and why it ended if it has."""

    async def work(sandbox: AsyncSandbox) -> None:
        seen = await sandbox.inspect()
        print(" ".join(str(word) for word in (seen.state, seen.cause or "", seen.reason) if word))

    if server_url() is None:
        _with(sandbox_id, work)
        return

    async def ask() -> None:
        server = the_server()
        page = await server.call("GET", "/events", params={"sandbox_id": sandbox_id, "limit": "1000"})
        await server.aclose()
        for event in page["items"]:
            words = (event["at"], event["before"], "->", event["after"], event["cause"] or "", event["reason"])
            print(" ".join(word for word in words if word))

    asyncio.run(ask())


def _with(sandbox_id: str, work: object) -> None:
    async def whole() -> None:
        sandbox = await attach(sandbox_id)
        try:
            await work(sandbox)  # type: ignore[operator]
        finally:
            await sandbox.detach()

    asyncio.run(whole())


def _inside(text: str) -> tuple[str, str] | None:
    """`ID:PATH`. A path that exists here, or that begins with `/` or `.`, is always one of this machine."""
    sandbox_id, colon, path = text.partition(":")
    if not colon or not sandbox_id or "/" in sandbox_id or text.startswith(".") or Path(text).exists():
        return None
    return sandbox_id, path or "."
