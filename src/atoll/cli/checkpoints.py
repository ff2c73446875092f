"""`atoll checkpoint`, `checkpoints`, `rollback`, `diff`, `undo`, `restart`, `fork`: saved states of one sandbox."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.target import JsonOption, age, iso_time, on_sandbox, plain_table, print_json, size

if TYPE_CHECKING:
    from atoll.model.checkpoint import Checkpoint
    from atoll.sandbox.sandbox import AsyncSandbox

SandboxArgument = Annotated[
    str, typer.Argument(metavar="SANDBOX", help="The id, name or task of the sandbox; `atoll ls` lists them.")
]
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The id or name of the checkpoint.")]
MemoryOption = Annotated[
    bool, typer.Option("--memory", help="Also save running processes; requires a sandbox with gVisor.")
]


def checkpoint(
    sandbox: SandboxArgument,
    name: Annotated[str, typer.Option("--name", help="A name to find the checkpoint by.")] = "",
    memory: MemoryOption = False,
    delete: Annotated[
        str, typer.Option("--delete", metavar="CHECKPOINT", help="Delete this checkpoint instead of saving one.")
    ] = "",
) -> None:
    """Save the state of a sandbox's files. Prints the id of the checkpoint."""

    async def work(found: AsyncSandbox) -> None:
        if delete:
            await found.delete_checkpoint(delete)
        else:
            print((await found.checkpoint(name, memory=memory)).id)

    on_sandbox(sandbox, work)


def checkpoints(sandbox: SandboxArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a sandbox, as a tree."""

    async def work(found: AsyncSandbox) -> None:
        listed = await found.checkpoints()
        if as_json:
            print_json([{**asdict(each), "created_at": iso_time(each.created_at)} for each in listed])
        else:
            _show(listed)

    on_sandbox(sandbox, work)


def rollback(sandbox: SandboxArgument, checkpoint: CheckpointArgument) -> None:
    """Roll back to a checkpoint: processes end and files are restored."""

    async def work(found: AsyncSandbox) -> None:
        await found.rollback(checkpoint)

    on_sandbox(sandbox, work)


def restart(sandbox: SandboxArgument) -> None:
    """Put a sandbox back into the state right after its creation."""

    async def work(found: AsyncSandbox) -> None:
        await found.restart()

    on_sandbox(sandbox, work)


def undo(
    sandbox: SandboxArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, help="How many commands to undo.")] = 1,
) -> None:
    """Undo the last commands of a sandbox that was made with undo."""

    async def work(found: AsyncSandbox) -> None:
        print(f"back to the state {(await found.undo(steps)).made_by}")

    on_sandbox(sandbox, work)


def diff(
    sandbox: SandboxArgument,
    old: CheckpointArgument,
    new: Annotated[
        str | None,
        typer.Argument(metavar="[CHECKPOINT]", help="The checkpoint to compare with; default: the present state."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", "-p", help="Also show the differences of text files.")] = False,
) -> None:
    """Show what was added (A), changed (C) and removed (R) since a checkpoint."""

    async def work(found: AsyncSandbox) -> None:
        for change in await found.diff(old, new, text=text):
            print(change)
            if change.text:
                print(change.text, end="")
            elif change.omitted is not None:
                print(f"  (no text difference: {change.omitted})")

    on_sandbox(sandbox, work)


def fork(
    sandbox: SandboxArgument,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many sandboxes to make.")] = 1,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="The checkpoint to start from; default: the present state.")
    ] = None,
    memory: MemoryOption = False,
) -> None:
    """Make new sandboxes that start from the state of another. Prints their ids."""

    async def work(found: AsyncSandbox) -> None:
        for twin in await found.fork(count, checkpoint, memory=memory):
            print(twin.access.listed_id())  # on a server this is its id there
            await twin.detach()

    on_sandbox(sandbox, work)


def _show(found: list[Checkpoint]) -> None:
    from rich.console import Console

    table = plain_table("id", "name", "size", "age", "made by")
    children: dict[str | None, list[Checkpoint]] = {}
    known = {each.id for each in found}
    for each in found:
        children.setdefault(each.parent if each.parent in known else None, []).append(each)

    waiting = [(each, 0) for each in reversed(children.get(None, []))]
    while waiting:
        each, depth = waiting.pop()
        # States that follow one another stay at one level; only branches are indented.
        below = children.get(each.id, [])
        table.add_row("  " * depth + each.id, each.name, size(each.size_bytes), age(each.created_at), each.made_by)
        waiting += [(child, depth + (len(below) > 1)) for child in reversed(below)]
    Console(highlight=False).print(table)
