"""Checkpoints of a sandbox: keep its state, compare, go back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from atoll import checkpoint as states
from atoll.server import results
from atoll.server.auth import SandboxReader, SandboxUser, Services_
from atoll.server.routes.sandboxes import SandboxId
from atoll.server.streaming import while_connected
from atoll.service import Success

router = APIRouter(prefix="/sandboxes/{sandbox_id}", tags=["checkpoints"])
CheckpointId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$", description="Its id or name.")]
Name = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,62})?$")]


class CheckpointInfo(BaseModel):
    id: str
    name: str
    created_at: float
    parent: str | None
    """The checkpoint that the sandbox came from when this one was made."""
    made_by: str
    size_bytes: int
    memory: bool

    @classmethod
    def of(cls, found: states.Checkpoint) -> CheckpointInfo:
        return cls(
            id=found.id,
            name=found.name,
            created_at=found.created_at,
            parent=found.parent,
            made_by=found.made_by,
            size_bytes=found.size_bytes,
            memory=found.memory,
        )


class CheckpointStart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Name = ""
    made_by: Annotated[str, Field(max_length=256)] = "user"
    """Why, in words: the command before which it is made."""
    memory: bool = False
    """Also of all processes. That needs isolation `gvisor`, and nobody may be connected."""
    drop_connections: bool = False
    """With memory: connections to the outside cannot be saved, and are in the way unless they may be dropped."""


class UndoSteps(BaseModel):
    model_config = ConfigDict(extra="forbid")
    steps: Annotated[int, Field(ge=1, le=1000)] = 1


class ChangeInfo(BaseModel):
    path: str
    kind: states.ChangeKind
    text: str | None = None
    omitted: states.Omitted | None = None
    """Why there is no text, if text was asked for."""

    @classmethod
    def of(cls, found: states.Change) -> ChangeInfo:
        return cls(path=printable(found.path), kind=found.kind, text=found.text, omitted=found.omitted)


@router.post("/checkpoints", operation_id="make_checkpoint")
async def make(
    caller: SandboxUser,
    services: Services_,
    sandbox_id: SandboxId,
    wanted: Annotated[CheckpointStart | None, Body()] = None,
) -> CheckpointInfo:
    """Keep the state of all files, at one moment, while it runs."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    wanted = wanted or CheckpointStart()
    made = await sandbox.checkpoint(
        wanted.name, made_by=wanted.made_by, memory=wanted.memory, drop_connections=wanted.drop_connections
    )
    return CheckpointInfo.of(made)


@router.get("/checkpoints", operation_id="list_checkpoints")
async def list_them(caller: SandboxReader, services: Services_, sandbox_id: SandboxId) -> list[CheckpointInfo]:
    """All of them, oldest first."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    return [CheckpointInfo.of(found) for found in await sandbox.checkpoints()]


@router.delete("/checkpoints/{checkpoint_id}", operation_id="delete_checkpoint")
async def delete(
    caller: SandboxUser, services: Services_, sandbox_id: SandboxId, checkpoint_id: CheckpointId
) -> Success:
    """Others are not affected. May be repeated."""
    await (await services.sandboxes.sandbox(caller, sandbox_id)).delete_checkpoint(checkpoint_id)
    return Success()


@router.get("/checkpoints/{checkpoint_id}/diff", operation_id="diff_checkpoint", response_model=list[ChangeInfo])
async def diff(
    caller: SandboxReader,
    services: Services_,
    sandbox_id: SandboxId,
    checkpoint_id: CheckpointId,
    request: Request,
    to: Annotated[str | None, Query(max_length=64, description="Another checkpoint; default: now.")] = None,
    text: bool = False,
) -> Response:
    """What was added, changed and removed since. Text differences have a budget of time and size; a change beyond it
    has no text, and `omitted` says why. The comparison is cancelled if the client goes away."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    changes = await while_connected(request, sandbox.diff(checkpoint_id, to, text=text))
    return results.listing(changes, ChangeInfo.of)


@router.post("/checkpoints/{checkpoint_id}/rollback", operation_id="rollback_sandbox")
async def rollback(
    caller: SandboxUser, services: Services_, sandbox_id: SandboxId, checkpoint_id: CheckpointId
) -> Success:
    """Go back: processes end, files are as they were, the id stays."""
    await (await services.sandboxes.sandbox(caller, sandbox_id)).rollback(checkpoint_id)
    return Success()


@router.post("/undo", operation_id="undo_commands")
async def undo(
    caller: SandboxUser,
    services: Services_,
    sandbox_id: SandboxId,
    wanted: Annotated[UndoSteps | None, Body()] = None,
) -> CheckpointInfo:
    """Take back the last commands: go to the state before them, which a sandbox made with `undo` keeps."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    return CheckpointInfo.of(await sandbox.undo((wanted or UndoSteps()).steps))


@router.post("/restart", operation_id="restart_sandbox")
async def restart(caller: SandboxUser, services: Services_, sandbox_id: SandboxId) -> Success:
    """Go back to the state right after it was created."""
    await (await services.sandboxes.sandbox(caller, sandbox_id)).restart()
    return Success()


def printable(path: str) -> str:
    """File names are bytes; an answer is text."""
    return path.encode(errors="surrogateescape").decode(errors="replace")
