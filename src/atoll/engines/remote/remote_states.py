"""Saved states of sandboxes on a server. The engine there does the work."""

from __future__ import annotations

import abc
import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.engines.enforcement import limit_details
from atoll.engines.remote.rest_client import Server, seconds_since_1970
from atoll.errors import CheckpointNotFoundError, SnapshotNotFoundError, UnsupportedError
from atoll.model import (
    NAME_LABEL,
    OWN_LABELS,
    Cause,
    EffectiveLimits,
    Handle,
    Limits,
    ListedSandbox,
    SandboxSpec,
    State,
)
from atoll.model.checkpoint import Change, ChangeKind, Checkpoint, Omitted, Snapshot
from atoll.model.handle import IMAGE, ISOLATION
from atoll.settings import Settings

MARK = "atoll-client"
ID_MARK = "atoll-client-id"
"""The label with the id that a sandbox has here, if its name on the server is one that its user chose."""
_LABEL = "client."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MEMORY_S = 300.0
_TRANSFER_S = 3600.0


class RemoteStates(abc.ABC):
    """The part of `Checkpointing` that concerns saved states on a server."""

    _server: Server
    _settings: Settings
    _start_timeout: float

    @abc.abstractmethod
    async def _remote_id(self, handle: Handle) -> str: ...

    @abc.abstractmethod
    async def _undo(self, making: asyncio.Task[Any]) -> None: ...

    # --- checkpoints ----------------------------------------------------------------------------------------------

    async def checkpoint(
        self, handle: Handle, *, name: str = "", made_by: str = "user", memory: bool = False
    ) -> Checkpoint:
        path = f"/sandboxes/{await self._remote_id(handle)}/checkpoints"
        # The caller has looked for connections already.
        body = {"name": name, "made_by": made_by, "memory": memory, "drop_connections": memory}
        seconds = _MEMORY_S if memory else None
        return _checkpoint(await self._server.call("POST", path, json=body, timeout_s=seconds), handle)

    async def checkpoints(self, handle: Handle) -> Sequence[Checkpoint]:
        found = await self._server.items(f"/sandboxes/{await self._remote_id(handle)}/checkpoints")
        return [_checkpoint(each, handle) for each in found]

    async def delete_checkpoint(self, handle: Handle, checkpoint_id: str) -> None:
        await self._server.call("DELETE", await self._saved(handle, checkpoint_id))

    async def rollback(self, handle: Handle, checkpoint_id: str | None) -> None:
        ready_s = handle.spec.ready.timeout_s if handle.spec.ready else 0.0  # the server waits for that too
        if checkpoint_id is None:
            # Its setup commands run again, and the server waits for them.
            setup_s = handle.spec.setup_timeout_s if handle.spec.setup else 0.0
            seconds = self._start_timeout + setup_s + ready_s if setup_s or ready_s else None
            path = f"/sandboxes/{await self._remote_id(handle)}/restart"
            await self._server.call("POST", path, timeout_s=seconds)
        else:
            seconds = self._start_timeout + ready_s if ready_s else None
            await self._server.call("POST", f"{await self._saved(handle, checkpoint_id)}/rollback", timeout_s=seconds)

    async def diff(self, handle: Handle, old: str, new: str | None, *, text: bool) -> Sequence[Change]:
        query = {"text": "true" if text else "false"} | ({} if new is None else {"to": new})
        found = await self._server.call("GET", f"{await self._saved(handle, old)}/diff", params=query)
        return [
            Change(
                each["path"],
                ChangeKind(each["kind"]),
                each["text"],
                Omitted(each["omitted"]) if each.get("omitted") else None,
            )
            for each in found
        ]

    async def hibernate(self, handle: Handle) -> None:
        path = f"/sandboxes/{await self._remote_id(handle)}/pause"
        await self._server.call("POST", path, json={"memory": "disk", "drop_connections": True}, timeout_s=_MEMORY_S)

    async def fork(
        self,
        handle: Handle,
        sandbox_ids: Sequence[str],
        checkpoint_id: str | None,
        *,
        memory: bool = False,
        labels: Sequence[Mapping[str, str]] = (),
    ) -> Sequence[Handle]:
        marks = labels or [handle.spec.labels] * len(sandbox_ids)
        body = {
            "count": len(sandbox_ids),
            "checkpoint": checkpoint_id,
            "memory": memory,
            "drop_connections": memory,
            "names": list(sandbox_ids),
            "labels": [self._marked(each) for each in marks],
        }
        work = self._server.call(
            "POST",
            f"/sandboxes/{await self._remote_id(handle)}/fork",
            key=f"fork-{secrets.token_hex(16)}",
            json=body,
            timeout_s=self._start_timeout * (1 + len(sandbox_ids) / 10) + (_MEMORY_S if memory else 0),
        )
        making = asyncio.create_task(work)
        try:
            made = await asyncio.shield(making)
        except asyncio.CancelledError:
            await self._undo(making)
            raise
        specs = [handle.spec.model_copy(update={"labels": dict(each)}) for each in marks]
        return [handle_of(info, id, spec) for info, id, spec in zip(made, sandbox_ids, specs, strict=True)]

    # --- snapshots ------------------------------------------------------------------------------------------------

    async def snapshot(self, handle: Handle, name: str, checkpoint_id: str | None, *, memory: bool = False) -> Snapshot:
        path = f"/sandboxes/{await self._remote_id(handle)}/snapshots"
        body = {"name": _checked(name), "checkpoint": checkpoint_id, "memory": memory, "drop_connections": memory}
        return _snapshot(await self._server.call("POST", path, safe=False, json=body, timeout_s=_MEMORY_S))

    async def snapshots(self) -> Sequence[Snapshot]:
        """List the user's own snapshots. An administrator would otherwise get those of all users."""
        me = (await self._server.call("GET", "/info"))["user_id"]
        found = await self._server.items("/snapshots", {"owner": me})
        return [_snapshot(each) for each in found]

    async def delete_snapshot(self, name: str) -> None:
        try:
            await self._server.call("DELETE", f"/snapshots/{_checked(name)}")
        except SnapshotNotFoundError:
            return

    async def export_snapshot(self, name: str, file: Path) -> None:
        await self._server.download(f"/snapshots/{_checked(name)}/content", file, _TRANSFER_S)

    async def import_snapshot(
        self, file: Path, name: str, *, most_bytes: int | None = None, memory: bool = False
    ) -> Snapshot:
        """Import a snapshot. The server decides how large it may be, and accepts no saved memory."""
        if memory:
            raise UnsupportedError(
                "a server does not import saved memory from a file", hint="Import the snapshot without it."
            )
        return _snapshot(await self._server.upload(f"/snapshots/{_checked(name)}/content", file, _TRANSFER_S))

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _saved(self, handle: Handle, checkpoint_id: str) -> str:
        if not _NAME.fullmatch(checkpoint_id):
            raise CheckpointNotFoundError(f"there is no checkpoint {checkpoint_id[:80]!r}")
        return f"/sandboxes/{await self._remote_id(handle)}/checkpoints/{checkpoint_id}"

    def _marked(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {
            MARK: self._settings.installation_id(),
            **{f"{_LABEL}{label}": value for label, value in labels.items()},
        }


def handle_of(info: Mapping[str, Any], sandbox_id: str, spec: SandboxSpec) -> Handle:
    created = seconds_since_1970(info["created_at"])
    details = {"remote_id": str(info["id"]), **effective_details(info)}
    if isinstance(info.get("isolation"), str):
        details[ISOLATION] = info["isolation"]
    if isinstance(info.get("image_defaults"), dict):  # servers of earlier versions do not say
        details[IMAGE] = json.dumps(info["image_defaults"])
        spec = spec.model_copy(update={"work_dir": str(info["work_dir"]), "user": info.get("user")})
    return Handle("remote", sandbox_id, spec, created, details)


def effective_details(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the limits in effect as details of a handle. They are empty for servers without default limits."""
    if info.get("effective_limits") is None:
        return {}
    given = Limits.model_validate(info["effective_limits"])
    return limit_details(EffectiveLimits(given, tuple(map(str, info.get("limits_left_out") or ()))))


def labels_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels that the sandbox has here."""
    found: Mapping[str, str] = info["labels"]
    named = {NAME_LABEL: str(info["name"])} if ID_MARK in found else {}
    return {label.removeprefix(_LABEL): value for label, value in found.items() if label.startswith(_LABEL)} | named


def id_of(info: Mapping[str, Any]) -> str:
    """Return the id that the sandbox has here."""
    return str(info["labels"].get(ID_MARK) or info["name"] or info["id"])


def listed(info: Mapping[str, Any]) -> ListedSandbox:
    """Return a sandbox of the server as it is listed. Labels that this engine added are not shown."""
    has_own_id = info["labels"].get(MARK) is not None
    shown = {label: value for label, value in info["labels"].items() if not label.startswith((MARK, _LABEL))}
    own = {label: value for label, value in labels_of(info).items() if not label.startswith(OWN_LABELS)}
    name = info["name"] if not has_own_id or ID_MARK in info["labels"] else None
    return ListedSandbox(
        str(info["id"]),
        str(info["engine"]),
        str(info["image"]),
        State(info["state"]),
        Cause(info["cause"]) if info["cause"] else None,
        str(info["reason"]),
        seconds_since_1970(info["created_at"]),
        name,
        {**shown, **own},
    )


def _checked(name: str) -> str:
    if "/" in name:
        raise UnsupportedError("a server that uses another server cannot keep snapshots for its own users")
    if not _NAME.fullmatch(name):
        raise SnapshotNotFoundError(f"there is no snapshot {name[:80]!r}")
    return name


def _checkpoint(info: Mapping[str, Any], handle: Handle) -> Checkpoint:
    return Checkpoint(
        info["id"],
        handle.sandbox_id,
        info["name"],
        seconds_since_1970(info["created_at"]),
        info["parent"],
        info["made_by"],
        info["size_bytes"],
        info["memory"],
    )


def _snapshot(info: Mapping[str, Any]) -> Snapshot:
    return Snapshot(
        info["name"],
        seconds_since_1970(info["created_at"]),
        info["image"],
        "",
        info["size_bytes"],
        info["source"],
        info["memory"],
    )
