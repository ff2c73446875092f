"""Names of sandboxes that no manager and no server keeps: each is unique among the sandboxes of an engine."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll.engines.contract import Engine, Listing
from atoll.errors import ConflictError
from atoll.model import MANAGER_LABEL, NAME_LABEL, Handle, SandboxSpec
from atoll.settings import Settings, owned_directory

_RETRY_S = 0.02


@asynccontextmanager
async def reserved(spec: SandboxSpec, engine: Engine, settings: Settings) -> AsyncIterator[None]:
    """Let the block create a sandbox with the name in the spec. Raises ConflictError if another sandbox has it.

    All programs of an installation that use the same name wait for one another, so that only one gets it. A manager
    and a server see to their names themselves.
    """
    name = spec.labels.get(NAME_LABEL)
    if name is None or MANAGER_LABEL in spec.labels or isinstance(engine, Listing):
        yield
        return
    path = owned_directory(settings.engine_run_dir("names"), 0o700) / name
    fd = await _locked(os.fspath(path))
    try:
        if taken := [each for each in await engine.list() if each.name == name and _is_free(each)]:
            raise ConflictError(
                f"there is a sandbox of the name {name!r} already: {taken[0].sandbox_id}",
                hint=f"Attach to it with Sandbox.attach({name!r}), delete it, or choose another name.",
            )
        yield
    finally:
        path.unlink(missing_ok=True)  # whoever waits for the lock looks whether the file is still there
        os.close(fd)


async def called(name: str, engine: Engine) -> Handle | None:
    """Return the sandbox of this name, or None if there is none. Raises ConflictError if several have it, as those of
    different owners may."""
    found = [each for each in await engine.list() if each.name == name]
    if len(found) > 1:
        ids = ", ".join(each.sandbox_id for each in found[:5])
        raise ConflictError(f"{name!r} is the name of {len(found)} sandboxes", hint=f"Name one by its id: {ids}.")
    return found[0] if found else None


def _is_free(handle: Handle) -> bool:
    """Whether the sandbox belongs to no manager, which has names of its own for each owner."""
    return MANAGER_LABEL not in handle.spec.labels


async def _locked(path: str) -> int:
    """Open the file and lock it, when nobody else has. The kernel releases the lock if this program dies."""
    while (fd := _lock(path)) is None:  # noqa: ASYNC110 -- the holder may be another program
        await asyncio.sleep(_RETRY_S)
    return fd


def _lock(path: str) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):  # somebody has it, or has just removed the file
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
