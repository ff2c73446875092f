"""The `atoll` command. Each group of subcommands is a module; this one combines them and turns errors into messages."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from atoll.cli import checkpoints, key, network, snapshot, spec
from atoll.cli.activity import events, logs, stats
from atoll.cli.copy import copy
from atoll.cli.demo import demo
from atoll.cli.doctor import doctor
from atoll.cli.ports import expose, port_forward, ports
from atoll.cli.run import execute, run
from atoll.cli.sandboxes import create, gc, keep_alive, list_sandboxes, pause, remove, resume
from atoll.cli.serve import config, serve
from atoll.cli.shell import shell
from atoll.cli.traces import traced_command
from atoll.errors import SandboxError, SetupError
from atoll.printable import printable_lines

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(context_settings={"ignore_unknown_options": False})(run)
app.command()(shell)
app.command()(doctor)
app.command("ls")(list_sandboxes)
app.command("rm")(remove)
app.command()(gc)
for command in (
    checkpoints.checkpoint,
    checkpoints.checkpoints,
    checkpoints.rollback,
    checkpoints.restart,
    checkpoints.undo,
    checkpoints.diff,
    checkpoints.fork,
):
    app.command()(command)
app.add_typer(snapshot.app, name="snapshot")
app.command()(demo)
app.command()(serve)
app.command()(create)
app.command("exec")(execute)
app.command("cp")(copy)
app.command()(logs)
app.command()(stats)
app.command()(pause)
app.command()(resume)
app.command()(keep_alive)
app.command()(events)
app.command()(config)
app.command("port-forward")(port_forward)
app.command("ports")(ports)
app.command("expose")(expose)
app.add_typer(network.app, name="network")
app.add_typer(spec.app, name="spec")
app.add_typer(key.app, name="key")


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
    if sys.argv[1:2] in ([], ["image"], ["--help"]):  # its imports take time, which other commands should not need
        from atoll.cli import image

        app.add_typer(image.app, name="image")
    try:
        with traced_command(sys.argv[1:]):
            app()
    except SandboxError as error:
        if isinstance(error, SetupError):
            print(printable_lines(error.output), file=sys.stderr)
        print(f"atoll: {error}", *([error.hint] if error.hint else []), sep="\n", file=sys.stderr)
        raise SystemExit(_FAILED) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # nothing reads the output any more, so there must be no complaint at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(141) from None
        print(f"atoll: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
