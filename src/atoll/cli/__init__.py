"""The `atoll` command. Each subcommand is a module; this one puts them together and turns errors into messages."""

from __future__ import annotations

import os
import sys

import typer

from atoll.cli.demo import demo
from atoll.cli.doctor import doctor
from atoll.cli.run import run
from atoll.cli.sandboxes import gc, list_sandboxes, remove
from atoll.cli.serve import serve
from atoll.cli.shell import shell
from atoll.errors import SandboxError

app = typer.Typer(
    help="Isolated Linux sandboxes for AI agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(context_settings={"ignore_unknown_options": False})(run)
app.command()(shell)
app.command()(doctor)
app.command("ls")(list_sandboxes)
app.command("rm")(remove)
app.command()(gc)
app.command()(demo)
app.command()(serve)

_FAILED = 125
"""As with `docker run`: the sandbox failed, not the command."""


def main() -> None:
    """Entry point: an error of ours is a message and exit code 125, never a traceback."""
    if sys.argv[1:2] in ([], ["image"], ["--help"]):  # it needs much that the others do not: loading it takes time
        from atoll.cli import image

        app.add_typer(image.app, name="image")
    try:
        app()
    except SandboxError as error:
        print(f"atoll: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads us any more: no complaint at exit either
            raise SystemExit(141) from None
        print(f"atoll: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
