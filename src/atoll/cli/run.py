"""`atoll run` and `atoll exec`: one command in a sandbox, as if it ran here."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.image_progress import fetch_image
from atoll.cli.options import EnvOption, SandboxFlags, make_sandbox, pair, with_sandbox_flags
from atoll.cli.target import SandboxArgument, attached

if TYPE_CHECKING:
    from atoll.sandbox.command import AsyncCommand
    from atoll.sandbox.sandbox import AsyncSandbox

_CHUNK = 65536
CommandArgument = Annotated[
    list[str], typer.Argument(help="The program and its arguments, after `--`.", metavar="-- COMMAND...")
]


@with_sandbox_flags
def run(
    wanted: SandboxFlags,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The program and its arguments, after `--`; the default is what the image runs.",
            metavar="[-- COMMAND...]",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds after which the command is killed (exit code 124).")
    ] = None,
) -> None:
    """Run one command in a new sandbox. Its input, output, errors and exit code are those of this program."""
    raise SystemExit(asyncio.run(_run(make_sandbox(wanted), command, timeout)))


def execute(
    sandbox_id: SandboxArgument,
    command: CommandArgument,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds after which the command is killed.")
    ] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help="The directory to start in.")] = None,
    env: EnvOption = None,
) -> None:
    """Run a command in an existing sandbox. Its input, output and exit code are those of this program."""
    variables = dict(pair(text, "a variable") for text in env or ())

    async def work() -> int:
        async with attached(sandbox_id) as sandbox:
            seconds = math.inf if timeout is None else timeout
            running = await sandbox.start(command, timeout=seconds, cwd=cwd, env=variables, stdin=True)
            return await _until_stopped(running)

    raise SystemExit(asyncio.run(work()))


async def _run(sandbox: AsyncSandbox, given: list[str] | None, timeout: float | None) -> int:
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []
    with stopped_by_signals(task, received):
        try:
            await fetch_image(sandbox)
            async with sandbox:
                command = given or await _command_of_image(sandbox)
                running = await sandbox.start(command, timeout=math.inf if timeout is None else timeout, stdin=True)
                code = await _relay(running)
                if code in (1, 2, 126, 127):
                    await _hint(sandbox, command)
                return code
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]


async def _command_of_image(sandbox: AsyncSandbox) -> list[str]:
    """Return the entry point of the sandbox's image and its arguments. Raises SpecError if it has none."""
    from atoll.errors import SpecError

    info = await sandbox.info()
    if not info.image_defaults.command:
        raise SpecError(
            f"the image {info.image!r} does not say what to run", hint="Write it after `--`, such as `-- sh -c 'ls'`."
        )
    return list(info.image_defaults.command)


async def _until_stopped(running: AsyncCommand) -> int:
    """Relay a command and return its exit code. The sandbox outlives this program, so an interrupted command is
    killed."""
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []
    with stopped_by_signals(task, received):
        try:
            return await _relay(running)
        except asyncio.CancelledError:
            await running.kill()
            if not received:
                raise
            return 128 + received[0]


async def _relay(running: AsyncCommand) -> int:
    """Relay standard input and output between this program and the command. Returns the command's exit code."""
    from atoll.model import Cause

    feeding = asyncio.create_task(_feed(running))
    try:
        async for output in running:
            _write_all(1 if output.name == "stdout" else 2, output.data)
        result = await running.wait()
    finally:
        feeding.cancel()
    if result.cause is Cause.TIMEOUT:
        print("atoll: the command timed out and was killed", file=sys.stderr)
    return result.exit_code


async def _feed(running: AsyncCommand) -> None:
    """Relay standard input until it ends. Reading may block for ever, so it happens in a daemon thread."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue()
    taken = threading.Semaphore(16)

    def read() -> None:
        piece = b"-"
        while piece:
            taken.acquire()
            try:
                piece = os.read(0, _CHUNK)
            except OSError:
                piece = b""
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the command has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        while piece := await pieces.get():
            await running.send_stdin(piece)
            taken.release()
        await running.close_stdin()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def stopped_by_signals(task: asyncio.Task[object], received: list[int]) -> Iterator[None]:
    """Cancel `task` at the first Ctrl-C or TERM, so that everything is cleaned up; later signals change nothing.

    Signals that the parent process has set to be ignored stay ignored: `nohup` does that, and so do scripts that start
    this program with `&`.
    """
    loop = asyncio.get_running_loop()
    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in stopping if signal.getsignal(number) is not signal.SIG_IGN]

    def stop(number: int) -> None:
        if not received:
            received.append(number)
            task.cancel()

    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)


async def _hint(sandbox: AsyncSandbox, command: list[str]) -> None:
    """Explain the most common mistake: the program needs a file that exists only on this machine."""
    for word in command:
        if os.path.isfile(word) and "\0" not in word and ".." not in word.split("/") and not await sandbox.exists(word):
            print(
                f"atoll: '{word}' is on this machine, not in the sandbox: add -v \"$PWD:/workspace:ro\"",
                file=sys.stderr,
            )
            return
