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
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.image_progress import fetch_image
from atoll.cli.options import SandboxFlags, make_sandbox, refuse_together, with_sandbox_flags
from atoll.cli.run import stopped_by_signals
from atoll.cli.target import on_sandbox
from atoll.errors import SandboxError

if TYPE_CHECKING:
    from atoll.sandbox.sandbox import AsyncSandbox
    from atoll.sandbox.terminal import AsyncTerminal


@with_sandbox_flags
def shell(
    wanted: SandboxFlags,
    sandbox_id: Annotated[
        str | None, typer.Argument(help="An existing sandbox; default: a new one, deleted at the end.", metavar="[ID]")
    ] = None,
) -> None:
    """Open an interactive shell in a new sandbox, which is deleted when the shell ends, or in an existing one."""
    if sandbox_id is not None:
        refuse_together("an existing sandbox", wanted)
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise SandboxError("`atoll shell` needs a terminal", hint="For scripts use: atoll run -- sh -c '...'")
    if sandbox_id is not None:
        raise SystemExit(on_sandbox(sandbox_id, lambda sandbox: _until_stopped(interact(sandbox))))
    raise SystemExit(asyncio.run(_until_stopped(_shell(make_sandbox(wanted)))))


async def interact(sandbox: AsyncSandbox) -> int:
    """Connect this terminal to a new one in the sandbox, until it ends. Returns its exit code."""
    rows, columns = _size()
    variables = {"TERM": os.environ.get("TERM", "xterm-256color")}
    terminal = await sandbox.open_terminal(rows=rows, columns=columns, env=variables)
    with _raw(), _relayed(terminal):
        async for data in terminal:
            _write(data)
        return await terminal.wait()


async def _shell(sandbox: AsyncSandbox) -> int:
    await fetch_image(sandbox)
    async with sandbox:
        print(f"sandbox {sandbox.id} on engine {sandbox.engine_name}; Ctrl-D or `exit` ends it", file=sys.stderr)
        return await interact(sandbox)


async def _until_stopped(work: Coroutine[Any, Any, int]) -> int:
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []
    with stopped_by_signals(task, received):
        try:
            return await work
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return max(1, min(size.lines, 1000)), max(1, min(size.columns, 1000))


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Send every key to the sandbox, including Ctrl-C. The terminal's mode is always restored."""
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _relayed(terminal: AsyncTerminal) -> Iterator[None]:
    """Relay keys and window changes to the sandbox during the block."""
    loop = asyncio.get_running_loop()
    keys: asyncio.Queue[bytes] = asyncio.Queue()

    def typed() -> None:
        try:
            data = os.read(0, 4096)
        except OSError:  # the terminal was closed
            data = b""
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
