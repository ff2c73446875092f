"""Checkpoints of a sandbox: save its state, compare, roll back."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from atoll.errors import CheckpointNotFoundError
from atoll.model import checkpoint as states
from atoll.server.connections import large_results
from atoll.server.connections.streaming import while_connected
from atoll.server.middleware.auth import AppServices, SandboxReadScope, SandboxUseScope
from atoll.server.routes.openapi_parts import CREATED, Limit, PageId, SandboxId, locate, moment
from atoll.server.routes.paging import page
from atoll.service.models.request_model import RequestModel
from atoll.tracing import span

router = APIRouter(prefix="/sandboxes/{sandbox_id}", tags=["checkpoints"])
CheckpointId = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$", description="The id or name of the checkpoint.")
]
Name = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,62})?$")]


class CheckpointInfo(BaseModel):
    """A checkpoint of a sandbox."""

    id: str
    """The id of the checkpoint."""
    name: str
    """The name of the checkpoint; may be empty."""
    created_at: datetime
    """When the checkpoint was saved."""
    parent: str | None
    """The checkpoint that the sandbox's state came from when this one was saved."""
    made_by: str
    """Why the checkpoint was saved, such as the command before which it was saved."""
    size_bytes: int
    """The space that the checkpoint takes."""
    memory: bool
    """Whether running processes were saved too."""

    @classmethod
    def of(cls, found: states.Checkpoint) -> CheckpointInfo:
        return cls(
            id=found.id,
            name=found.name,
            created_at=moment(found.created_at),
            parent=found.parent,
            made_by=found.made_by,
            size_bytes=found.size_bytes,
            memory=found.memory,
        )


class CheckpointPage(BaseModel):
    """One page of checkpoints."""

    items: list[CheckpointInfo]
    """The checkpoints of this page, oldest first."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class CheckpointRequest(RequestModel):
    """The checkpoint to save."""

    of = "a checkpoint"
    name: Name = ""
    """A name for the checkpoint, unique in the sandbox."""
    made_by: Annotated[str, Field(max_length=256)] = "user"
    """Why the checkpoint is saved, in words."""
    memory: bool = False
    """Whether to save running processes too. Needs isolation level `gvisor`, and nobody may be connected to the
    sandbox."""
    drop_connections: bool = False
    """Connections to the outside cannot be saved, so with `memory` an open one makes the request fail unless this is
    true."""


class UndoRequest(RequestModel):
    """How far to go back."""

    of = "an undo"
    steps: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many commands to undo."""


class ChangeInfo(BaseModel):
    """One difference between two states of a sandbox."""

    path: str
    """The path of the file."""
    kind: states.ChangeKind
    """Whether the file was added, changed or removed."""
    text: str | None = None
    """The difference as text, if it was requested."""
    omitted: states.Omitted | None = None
    """Why there is no text although it was requested."""

    @classmethod
    def of(cls, found: states.Change) -> ChangeInfo:
        return cls(path=printable(found.path), kind=found.kind, text=found.text, omitted=found.omitted)


@router.post(
    "/checkpoints", operation_id="make_checkpoint", summary="Save a checkpoint", status_code=201, responses=CREATED
)
async def make(
    caller: SandboxUseScope,
    services: AppServices,
    sandbox_id: SandboxId,
    response: Response,
    wanted: Annotated[CheckpointRequest | None, Body()] = None,
) -> CheckpointInfo:
    """Save the state of all files of a running sandbox at one moment. With `memory`, running processes are saved
    too."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    wanted = wanted or CheckpointRequest()
    with span("service.make_checkpoint", user_id=caller.user_id, sandbox_id=sandbox.id):
        made = await sandbox.checkpoint(
            wanted.name, made_by=wanted.made_by, memory=wanted.memory, drop_connections=wanted.drop_connections
        )
    locate(response, f"/sandboxes/{sandbox_id}/checkpoints/{made.id}")
    return CheckpointInfo.of(made)


@router.get("/checkpoints", operation_id="list_checkpoints", summary="List the checkpoints of a sandbox")
async def list_them(
    caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId, page_id: PageId = None, limit: Limit = 100
) -> CheckpointPage:
    """Return the checkpoints of the sandbox, oldest first, one page at a time."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    found, more = page(await sandbox.checkpoints(), lambda each: (each.created_at, each.id), page_id, limit)
    return CheckpointPage(items=[CheckpointInfo.of(each) for each in found], next_page_id=more)


@router.get("/checkpoints/{checkpoint_id}", operation_id="get_checkpoint", summary="Get a checkpoint")
async def get(
    caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId, checkpoint_id: CheckpointId
) -> CheckpointInfo:
    """Return one checkpoint by its id or its name. Of several with this name, the newest."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    for each in reversed(await sandbox.checkpoints()):
        if checkpoint_id in (each.id, each.name):
            return CheckpointInfo.of(each)
    raise CheckpointNotFoundError(f"sandbox '{sandbox_id}' has no checkpoint {checkpoint_id!r}")


@router.delete(
    "/checkpoints/{checkpoint_id}", operation_id="delete_checkpoint", summary="Delete a checkpoint", status_code=204
)
async def delete(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, checkpoint_id: CheckpointId
) -> None:
    """Delete a checkpoint. Other checkpoints are not affected. Deleting one that does not exist changes nothing."""
    await (await services.sandboxes.sandbox(caller, sandbox_id)).delete_checkpoint(checkpoint_id)


@router.get(
    "/checkpoints/{checkpoint_id}/diff",
    operation_id="diff_checkpoint",
    summary="Compare a checkpoint",
    response_model=list[ChangeInfo],
)
async def diff(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    checkpoint_id: CheckpointId,
    request: Request,
    to: Annotated[
        str | None,
        Query(
            max_length=64, description="The id or name of the checkpoint to compare with. Default: the present state."
        ),
    ] = None,
    text: Annotated[bool, Query(description="Whether to return the differences of text files.")] = False,
) -> Response:
    """Return the files that were added, changed or removed since a checkpoint, or between two checkpoints. Text
    differences have a budget of time and size; a change beyond it has no text, and `omitted` says why."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    changes = await while_connected(request, sandbox.diff(checkpoint_id, to, text=text))
    return large_results.listing(changes, ChangeInfo.of)


@router.post(
    "/checkpoints/{checkpoint_id}/rollback",
    operation_id="rollback_sandbox",
    summary="Roll back to a checkpoint",
    status_code=204,
)
async def rollback(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, checkpoint_id: CheckpointId
) -> None:
    """Put the sandbox back into the state of a checkpoint. Its processes end and its files are restored; its id stays
    the same."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    with span("service.rollback_sandbox", user_id=caller.user_id, sandbox_id=sandbox.id):
        await sandbox.rollback(checkpoint_id)


@router.post("/undo", operation_id="undo_commands", summary="Undo the last commands")
async def undo(
    caller: SandboxUseScope,
    services: AppServices,
    sandbox_id: SandboxId,
    wanted: Annotated[UndoRequest | None, Body()] = None,
) -> CheckpointInfo:
    """Put the sandbox back into the state before its last commands. The sandbox must have been made with `undo`."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    with span("service.undo_commands", user_id=caller.user_id, sandbox_id=sandbox.id):
        return CheckpointInfo.of(await sandbox.undo((wanted or UndoRequest()).steps))


@router.post("/restart", operation_id="restart_sandbox", summary="Restart a sandbox", status_code=204)
async def restart(caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId) -> None:
    """Put the sandbox back into the state it had right after its creation. Its id stays the same."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    with span("service.restart_sandbox", user_id=caller.user_id, sandbox_id=sandbox.id):
        await sandbox.restart()


def printable(path: str) -> str:
    """Return a file name, which is bytes, as valid text."""
    return path.encode(errors="surrogateescape").decode(errors="replace")
