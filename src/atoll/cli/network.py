"""`atoll network log`, `atoll network set`: what a sandbox may reach, and what was refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from atoll.cli.target import JsonOption, SandboxArgument, on_sandbox, print_json, show
from atoll.errors import SpecError

app = typer.Typer(help="What sandboxes may reach, and what was refused.", no_args_is_help=True)


@app.command("log")
def log(sandbox_id: SandboxArgument, as_json: JsonOption = False) -> None:
    """Show what a sandbox was refused: when, where to, under which name, and by which rule."""

    found = on_sandbox(sandbox_id, lambda sandbox: sandbox.network_log())
    if as_json:
        print_json([asdict(each) for each in found])
        return
    show(
        [{**asdict(each), "time": datetime.fromtimestamp(each.time).isoformat(" ", "seconds")} for each in found],
        False,
    )


@app.command("set")
def set_policy(
    sandbox_id: SandboxArgument,
    policy: Annotated[
        str, typer.Argument(help="none, all, domains separated by commas, or a policy in JSON.", metavar="POLICY")
    ],
) -> None:
    """Change what a running sandbox may reach. Connections that are no longer allowed are closed."""

    on_sandbox(sandbox_id, lambda sandbox: sandbox.set_network(read_policy(policy)))


def read_policy(text: str) -> Any:
    """Parse a policy as it is written on a command line. Raises SpecError."""
    if text in ("none", "all"):
        return text
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise SpecError(f"the policy is not JSON: {error}") from error
    return {"allowed_domains": [each.strip() for each in text.split(",") if each.strip()]}
