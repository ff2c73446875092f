"""`atoll demo`: a short tour of what a sandbox does, as shown by `make demo`."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from atoll._sync import Sandbox
from atoll.errors import SandboxTimeoutError

_PRIMES = "print([n for n in range(2, 50) if all(n % d for d in range(2, n))])"


def demo(engine: Annotated[str, typer.Option("--engine", help="The engine that makes the sandbox.")] = "auto") -> None:
    """Show a sandbox at work: commands, a persistent shell, files, isolation and a timeout."""
    console = Console(highlight=False)
    started = time.perf_counter()
    with Sandbox(engine=engine) as sandbox:
        made = (time.perf_counter() - started) * 1000
        console.print(f"[bold]A sandbox[/] on engine [green]{sandbox.engine_name}[/], ready after {made:.0f} ms\n")
        _show(console, "untrusted code", f"exec(['python3', '-c', {_PRIMES!r}])", _run_python(sandbox))
        sandbox.write_file("notes/a.txt", "hello from outside\n")
        _show(console, "a file goes in", "write_file('notes/a.txt', …); run_command('cat notes/a.txt')", _cat(sandbox))
        sandbox.run_command("cd notes; greeting='still here'")
        remembered = sandbox.run_command("echo $greeting, in $PWD")
        _show(console, "a shell that remembers", "run_command('cd notes; …'), run_command('echo …')", remembered)
        _show(console, "walls", "ps, network, the host's files", _walls(sandbox))
        _show(console, "a deadline", "run_command('sleep 60', timeout=0.5)", _deadline(sandbox))
    console.print("The sandbox is gone, with everything in it.\n")
    console.print("Next, in this directory:")
    for line in ("atoll shell", "atoll run -- python3 -c 'print(1)'", "atoll doctor"):
        console.print(f"  .venv/bin/{line}", style="bold")


def _show(console: Console, title: str, code: str, output: str) -> None:
    console.print(f"[bold]{title}[/]  [dim]{escape(code)}[/]", soft_wrap=True)
    for line in output.rstrip("\n").splitlines():
        console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print()


def _run_python(sandbox: Sandbox) -> str:
    result = sandbox.exec(["python3", "-c", _PRIMES], timeout=10)
    if result.exit_code == 127:  # an image without Python
        result = sandbox.exec("echo $((6 * 7))", timeout=10)
    return f"{result.stdout.rstrip()}   exit code {result.exit_code}, {result.duration_s * 1000:.0f} ms"


def _cat(sandbox: Sandbox) -> str:
    return sandbox.run_command("cat notes/a.txt")


def _walls(sandbox: Sandbox) -> str:
    return "\n".join(
        [
            "processes it sees: " + sandbox.run_command("ls /proc | grep -c '^[0-9]'"),
            "network interfaces: "
            + sandbox.run_command("ls /sys/class/net 2>/dev/null || cut -d: -f1 -s /proc/net/dev | xargs"),
            "home directories it sees: " + sandbox.run_command("ls -d /home/* /root 2>/dev/null | xargs"),
        ]
    )


def _deadline(sandbox: Sandbox) -> str:
    try:
        return sandbox.run_command("sleep 60", timeout=0.5)
    except SandboxTimeoutError as error:
        return f"SandboxTimeoutError: {error.reason}"
