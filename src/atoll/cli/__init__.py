"""The `atoll` command: the list of its commands, each group of which is a module, and how errors become messages."""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from atoll.cli.listed_command import ListedCommand
from atoll.cli.traces import traced_command
from atoll.errors import SandboxError, SetupError, StartError
from atoll.printable import printable_lines

COMMANDS = (
    ("run", "atoll.cli.run:run", "Run one command in a new sandbox."),
    (
        "shell",
        "atoll.cli.shell:shell",
        "Open an interactive shell in a new sandbox, which is deleted when the shell ends, or in an existing one.",
    ),
    ("doctor", "atoll.cli.doctor:doctor", "Show what works on this machine, what is missing, and what to install."),
    ("ls", "atoll.cli.sandboxes:list_sandboxes", "List the sandboxes of this installation, or yours on the server."),
    ("rm", "atoll.cli.sandboxes:remove", "Delete sandboxes and everything in them."),
    (
        "gc",
        "atoll.cli.sandboxes:gc",
        "Remove what nobody owns any more: remains of killed programs, and images without a name.",
    ),
    ("checkpoint", "atoll.cli.checkpoints:checkpoint", "Save the state of a sandbox's files."),
    ("checkpoints", "atoll.cli.checkpoints:checkpoints", "List the checkpoints of a sandbox, as a tree."),
    ("rollback", "atoll.cli.checkpoints:rollback", "Roll back to a checkpoint: processes end and files are restored."),
    ("restart", "atoll.cli.checkpoints:restart", "Put a sandbox back into the state right after its creation."),
    ("undo", "atoll.cli.checkpoints:undo", "Undo the last commands of a sandbox that was made with undo."),
    ("diff", "atoll.cli.checkpoints:diff", "Show what was added (A), changed (C) and removed (R) since a checkpoint."),
    ("fork", "atoll.cli.checkpoints:fork", "Make new sandboxes that start from the state of another."),
    (
        "demo",
        "atoll.cli.demo:demo",
        "Show a sandbox at work: commands, a persistent shell, files, isolation and a timeout.",
    ),
    ("serve", "atoll.cli.serve:serve", "Serve sandboxes over HTTP until SIGTERM."),
    ("create", "atoll.cli.sandboxes:create", "Create a sandbox that stays until it is removed, and print its id."),
    ("exec", "atoll.cli.run:execute", "Run a command in an existing sandbox."),
    ("cp", "atoll.cli.copy:copy", "Copy files and directories into a sandbox or out of it."),
    ("logs", "atoll.cli.activity:logs", "Show what happened to a sandbox, and why it ended if it has."),
    ("stats", "atoll.cli.activity:stats", "Show what a sandbox uses, and the limits of that."),
    ("pause", "atoll.cli.sandboxes:pause", "Pause a sandbox: stop its processes where they are."),
    ("resume", "atoll.cli.sandboxes:resume", "Resume a paused sandbox."),
    (
        "keep-alive",
        "atoll.cli.sandboxes:keep_alive",
        "Count a sandbox as in use for a while, so that it is neither ended nor paused for being idle.",
    ),
    ("limits", "atoll.cli.limits:limits", "Show the limits of a sandbox, or change those that are given."),
    ("events", "atoll.cli.activity:events", "Show what happened to your sandboxes on the server."),
    (
        "config",
        "atoll.cli.serve:config",
        "Show every setting of `atoll serve`: its value here, where the value comes from, and how to set it.",
    ),
    ("port-forward", "atoll.cli.ports:port_forward", "Forward a local port to a port in the sandbox, until Ctrl-C."),
    ("ports", "atoll.cli.ports:ports", "List what listens in a sandbox, with its process and, on a server, its URL."),
    ("expose", "atoll.cli.ports:expose", "Expose a port of a sandbox on the server, and print a link to it."),
    ("snapshot", "atoll.cli.snapshot:app", "Saved states that new sandboxes can start from: --image snapshot:NAME."),
    ("volume", "atoll.cli.volume:app", "Named volumes, which outlive the sandboxes that mount them: -v NAME:/path."),
    ("network", "atoll.cli.network:app", "What sandboxes may reach, and what was refused."),
    ("spec", "atoll.cli.spec:app", "The server's catalogue of specs."),
    ("key", "atoll.cli.key:app", "API keys of a server."),
    ("build", "atoll.cli.build:build", "Build an image from a Dockerfile."),
    ("image", "atoll.cli.image:app", "Root file systems that sandboxes start from."),
)
"""The name of each command, where it is, and the first sentence of its help, in the order of `atoll --help`."""


class Commands(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, target, help in COMMANDS:
            self.add_command(ListedCommand(name, target, help))


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def options(
    server: Annotated[str | None, typer.Option(help="Use this server; default: ATOLL_URL, else this machine.")] = None,
) -> None:
    """Isolated Linux sandboxes for AI agents."""
    if server is not None:
        os.environ["ATOLL_URL"] = server


_FAILED = 125
"""The exit code, as with `docker run`, if the sandbox failed and not the command."""


def main() -> None:
    """Run the command line. An error of Atoll's is a message and exit code 125, never a traceback."""
    if "serve" not in sys.argv[1:4]:
        # What is imported stays: looking for garbage among it less often, and not when the interpreter ends, saves a
        # tenth of the time of a short command. A server lives long and keeps to Python's own habit.
        gc.set_threshold(100_000, 5, 2)
    try:
        with traced_command(sys.argv[1:]):
            app()
    except SandboxError as error:
        if isinstance(error, SetupError | StartError):
            print(printable_lines(error.output), file=sys.stderr)
        # A server's words, or a name that was pasted, may contain what controls a terminal.
        said = [f"atoll: {error}", *([error.hint] if error.hint else [])]
        print(printable_lines("\n".join(said)), file=sys.stderr)
        raise SystemExit(_FAILED) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # nothing reads the output any more, so there must be no complaint at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(141) from None
        print(printable_lines(f"atoll: {error}"), file=sys.stderr)
        raise SystemExit(_FAILED) from None
    finally:
        gc.freeze()
