"""`atoll shell`: an interactive terminal in a fresh sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Annotated

import typer

from atoll.cli.options import (
    CpusOption,
    EngineOption,
    EnvOption,
    ImageOption,
    MemoryOption,
    NetworkOption,
    PidsOption,
    VolumeOption,
    make_sandbox,
)
from atoll.cli.target import attach
from atoll.errors import SandboxError
from atoll.sandbox import AsyncSandbox
from atoll.terminal import AsyncTerminal


def shell(
    sandbox_id: Annotated[
        str | None, typer.Argument(help="One that exists; default: a fresh one, deleted at the end.", metavar="[ID]")
    ] = None,
    engine: EngineOption = "auto",
    image: ImageOption = "host",
    memory: MemoryOption = None,
    cpus: CpusOption = None,
    pids: PidsOption = None,
    env: EnvOption = None,
    volume: VolumeOption = None,
    network: NetworkOption = "none",
) -> None:
    """Open an interactive shell in a fresh sandbox, which is deleted when the shell ends, or in one that exists."""
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise SandboxError("`atoll shell` needs a terminal", hint="For scripts use: atoll run -- sh -c '...'")
    if sandbox_id is not None:
        raise SystemExit(asyncio.run(_visit(sandbox_id)))
    raise SystemExit(asyncio.run(_shell(make_sandbox(engine, image, memory, cpus, pids, env, volume, network))))


async def _visit(sandbox_id: str) -> int:
    sandbox = await attach(sandbox_id)
    try:
        return await _interact(sandbox)
    finally:
        await sandbox.detach()


async def _interact(sandbox: AsyncSandbox) -> int:
    rows, columns = _size()
    variables = {"TERM": os.environ.get("TERM", "xterm-256color")}
    terminal = await sandbox.open_terminal(rows=rows, columns=columns, env=variables)
    with _raw(), _relayed(terminal):
        async for data in terminal:
            _write(data)
        return await terminal.wait()


async def _shell(sandbox: AsyncSandbox) -> int:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        async with sandbox:
            print(f"sandbox {sandbox.id} on engine {sandbox.engine_name}; Ctrl-D or `exit` ends it", file=sys.stderr)
            return await _interact(sandbox)
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return max(1, min(size.lines, 1000)), max(1, min(size.columns, 1000))


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too; the terminal is as before afterwards, whatever happens."""
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _relayed(terminal: AsyncTerminal) -> Iterator[None]:
    """Keys and window changes go to the sandbox while this holds."""
    loop = asyncio.get_running_loop()
    keys: asyncio.Queue[bytes] = asyncio.Queue()

    def typed() -> None:
        data = os.read(0, 4096)
        keys.put_nowait(data)
        if not data:
            loop.remove_reader(0)

    async def send() -> None:
        with contextlib.suppress(BrokenPipeError):
            while data := await keys.get():
                await terminal.write(data)

    resizes: set[asyncio.Task[None]] = set()

    def resized() -> None:
        resizing = loop.create_task(terminal.resize(*_size()))
        resizes.add(resizing)
        resizing.add_done_callback(resizes.discard)

    sending = loop.create_task(send())
    loop.add_reader(0, typed)
    loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        loop.remove_reader(0)
        loop.remove_signal_handler(signal.SIGWINCH)
        sending.cancel()
