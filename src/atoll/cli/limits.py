"""`atoll limits`: what a sandbox may use, and changing it while the sandbox runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from atoll.cli.target import JsonOption, SandboxArgument, on_sandbox, print_json, show, size
from atoll.model import SandboxDetails
from atoll.sandbox.sandbox import AsyncSandbox


def limits(
    sandbox_id: SandboxArgument,
    memory: Annotated[str | None, typer.Option(help="New memory limit, such as 512m.")] = None,
    cpus: Annotated[float | None, typer.Option(help="New number of CPUs; fractions are allowed.")] = None,
    pids: Annotated[int | None, typer.Option(help="New number of processes and threads.")] = None,
    disk: Annotated[str | None, typer.Option(help="New disk limit, such as 2g.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the limits of a sandbox, or change those that are given. Either all of them change or none."""

    async def work(sandbox: AsyncSandbox) -> SandboxDetails:
        if (memory, cpus, pids, disk) == (None, None, None, None):
            return await sandbox.info()
        return await sandbox.set_limits(memory=memory, cpus=cpus, pids=pids, disk=disk)

    found = on_sandbox(sandbox_id, work)
    if as_json:
        details = asdict(found)
        print_json({**details, "limits": found.limits.model_dump()})
        return
    show([{"limit": name, "value": text} for name, text in _rows(found)], False)


def _rows(found: SandboxDetails) -> list[tuple[str, str]]:
    rows = []
    for name, value in found.limits.model_dump(exclude_none=True).items():
        text = size(value) if name.endswith("_bytes") else f"{value:g} s" if name.endswith("_s") else f"{value:g}"
        rows.append((name.removesuffix("_bytes").removesuffix("_s").replace("_", " "), text))
    rows += [
        (name.removesuffix("_bytes").replace("_", " "), "none: cannot be enforced") for name in found.limits_left_out
    ]
    return rows
