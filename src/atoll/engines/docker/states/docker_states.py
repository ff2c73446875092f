"""Saved states of containers, by means of the Docker API.

A checkpoint is a `docker commit`, during which the container is paused: tenths of a second, and more if much was
written. A rollback and a fork create new containers from such an image. A snapshot and a comparison read all files of
the sandbox. Contents of volumes are never saved, not even of those that an image declares.
"""

from __future__ import annotations

import abc
import functools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.docker.api.http import RefusedError
from atoll.engines.docker.api.image_pull import Image
from atoll.engines.docker.container_maker import Prepare, is_abandoned, maker_label
from atoll.engines.docker.container_plan import INSTALLATION, SANDBOX
from atoll.engines.docker.states import fresh_identity, image_archive, tree_difference
from atoll.engines.docker.states.commits import SavedState
from atoll.engines.docker.states.docker_rollback import ORIGIN, DockerRollback
from atoll.engines.host import exclusion
from atoll.engines.host.saved_states import all_or_none, checked_name, fork_specs, none_if_failed
from atoll.errors import (
    CheckpointNotFoundError,
    ConflictError,
    EngineError,
    EngineUnavailableError,
    SandboxResourceError,
    UnsupportedError,
)
from atoll.model import Handle, SandboxSpec
from atoll.model.checkpoint import Change, Checkpoint

_USES = "docker-states"
_EXPORT_S = 1800.0
_AT_ONCE = 4


class DockerStates(DockerRollback, abc.ABC):
    """The part of `Checkpointing` that concerns checkpoints and forks."""

    @abc.abstractmethod
    async def delete(self, handle: Handle) -> None: ...

    @abc.abstractmethod
    async def _make(self, sandbox_id: str, spec: SandboxSpec, image: Image | None) -> Handle: ...

    # --- checkpoints -----------------------------------------------------------------------------------------------

    async def checkpoint(
        self, handle: Handle, *, name: str = "", made_by: str = "user", memory: bool = False
    ) -> Checkpoint:
        if memory:
            raise no_memory()
        if name:
            checked_name(name)
        async with self._alone(handle):
            container = await self._container(handle)
            saved = await self._described(handle, container, name, made_by)
            await self._check_room(handle, saved)
            return (await finish(self._commits.commit(container, saved, "checkpoint"))).as_checkpoint()

    async def _check_room(self, handle: Handle, more: SavedState) -> None:
        """Raise SandboxResourceError if another checkpoint would exceed the disk limit. The Docker engine limits only
        the container itself; Atoll also counts its checkpoints."""
        most = handle.limits().limits.disk_bytes
        if most is None:
            return
        kept = sum(saved.size_bytes for saved in await self._all_of(handle))
        if kept + more.size_bytes > most:
            raise SandboxResourceError(
                f"the checkpoints of sandbox '{handle.sandbox_id}' would exceed its disk limit of {most} bytes",
                hint="Delete some checkpoints first.",
            )

    async def checkpoints(self, handle: Handle) -> Sequence[Checkpoint]:
        await self._container(handle)
        return [saved.as_checkpoint() for saved in await self._all_of(handle)]

    async def delete_checkpoint(self, handle: Handle, checkpoint_id: str) -> None:
        with suppress(CheckpointNotFoundError):
            await finish(self._drop(await self._find(handle, checkpoint_id)))

    async def rollback(self, handle: Handle, checkpoint_id: str | None) -> None:
        async with self._alone(handle):
            container = await self._container(handle)
            if checkpoint_id is None:
                await self._go_to(handle, container, await self._origin(handle, container))
                return
            async with self._kept(handle, checkpoint_id) as target:
                await self._go_to(handle, container, target.as_image())

    async def fork(
        self,
        handle: Handle,
        sandbox_ids: Sequence[str],
        checkpoint_id: str | None = None,
        *,
        memory: bool = False,
        labels: Sequence[Mapping[str, str]] = (),
    ) -> Sequence[Handle]:
        if memory:
            raise no_memory()
        specs = fork_specs(self._current(handle).spec, len(sandbox_ids), labels)
        await self._container(handle)
        self._exclusion.refuse_deleted(handle.sandbox_id)
        async with none_if_failed(self.delete) as made, self._kept(handle, checkpoint_id, "fork") as source:
            image, wanted = source.as_image(), list(zip(sandbox_ids, specs, strict=True))
            made += await all_or_none(wanted, lambda id, spec: self._make(id, spec, image), self.delete, _AT_ONCE)
        return made

    async def hibernate(self, handle: Handle) -> None:
        raise no_memory()

    async def diff(self, handle: Handle, old: str, new: str | None = None, *, text: bool = False) -> Sequence[Change]:
        """List the differences between two states by reading all files of both."""
        async with self._kept(handle, old) as before, self._kept(handle, new) as after:
            with tempfile.TemporaryDirectory(prefix="atoll-diff-", dir=self._settings.data_dir) as folder:
                files = [Path(folder, "old"), Path(folder, "new")]
                for saved, file in zip((before, after), files, strict=True):
                    await self._write_tree(saved, file)
                return await workers.run_cancellable(
                    workers.COMPARISON,
                    lambda cancellation: tree_difference.changes(*files, text=text, cancellation=cancellation),
                )

    # --- for the rest of the engine --------------------------------------------------------------------------------

    async def _forget_states(self, sandbox_id: str) -> None:
        """Remove the checkpoints of a deleted sandbox, except those that forks need."""
        for saved in await self._commits.all("checkpoint"):
            if saved.sandbox_id == sandbox_id:
                await self._drop(saved, sweep=False)
        await self._sweep()

    async def _collect(self) -> list[str]:
        """Remove containers that were never started because their creator died, and complete interrupted deletions."""
        removed, installation = [], self._settings.installation_id()
        for entry in await self._containers.labelled(f"{INSTALLATION}={installation}"):
            sandbox_id = str((entry.get("Labels") or {}).get(SANDBOX, ""))
            if not is_abandoned(entry) or (sandbox_id and await self._is_on_its_way_back(entry, sandbox_id)):
                continue
            await self._containers.remove(str(entry["Id"]))
            removed.append(f"container {str(entry['Id'])[:12]}, which was never started")
        for sandbox_id in self._limits.ids():
            # The container is looked up only now, because a change is recorded for one that exists already.
            who = self._who(sandbox_id)
            if not self._exclusion.is_busy(sandbox_id) and await self._containers.inspect(who.container) is None:
                self._limits.forget(sandbox_id)
        for home in self._settings.engine_run_dir("docker").iterdir():
            if self._exclusion.is_being_deleted(home.name) and not self._exclusion.is_busy(home.name):
                await self.delete(Handle("docker", home.name, SandboxSpec(), 0.0))
                removed.append(f"sandbox {home.name}")
        await self._sweep()
        return removed

    # --- its parts -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _uses(self) -> exclusion.Exclusion:
        return exclusion.Exclusion(lambda name: self._settings.engine_run_dir(_USES) / name, lasting=False)

    async def _container(self, handle: Handle) -> dict[str, Any]:
        found = await self._completed(self._who(handle.sandbox_id).container)
        if found is None:
            raise exclusion.deleted(handle.sandbox_id)
        return found

    @asynccontextmanager
    async def _alone(self, handle: Handle) -> AsyncIterator[None]:
        """Hold off other operations of this installation on the sandbox. Errors caused by its deletion are reported as
        such."""
        async with self._exclusion.alone(handle.sandbox_id):
            try:
                yield
            except EngineUnavailableError:
                raise  # another request would wait for the engine again
            except EngineError as error:
                if await self._containers.inspect(self._who(handle.sandbox_id).container) is None:
                    raise exclusion.deleted(handle.sandbox_id) from error
                raise

    async def _all_of(self, handle: Handle) -> list[SavedState]:
        return [saved for saved in await self._commits.all("checkpoint") if saved.sandbox_id == handle.sandbox_id]

    async def _find(self, handle: Handle, checkpoint: str) -> SavedState:
        for saved in reversed(await self._all_of(handle)):
            if checkpoint and checkpoint in (saved.id, saved.name):
                return saved
        raise CheckpointNotFoundError(
            f"sandbox '{handle.sandbox_id}' has no checkpoint {checkpoint[:80]!r}",
            hint="`checkpoints()` lists what there is.",
        )

    async def _described(self, handle: Handle, container: dict[str, Any], name: str, made_by: str) -> SavedState:
        """Return the description of the sandbox's current state."""
        image = await self._origin(handle, container)
        return SavedState(
            id=os.urandom(12).hex(),
            sandbox_id=handle.sandbox_id,
            name=name,
            created_at=time.time(),
            parent=_parent(container, await self._all_of(handle)),
            made_by=made_by,
            size_bytes=await self._containers.written_bytes(str(container["Id"])),
            image=handle.spec.image,
            env=image.env,
            defaults=image.defaults.shortened(),
        )

    async def _origin(self, handle: Handle, container: dict[str, Any]) -> Image:
        """Return the image that the sandbox was created from."""
        labels = (container.get("Config") or {}).get("Labels") or {}
        image_id = str(labels.get(ORIGIN) or container["Image"])
        for kind in ("origin", "snapshot", "checkpoint"):
            for saved in await self._commits.all(kind):
                if saved.image_id == image_id:
                    return saved.as_image()
        return await self._base_image(handle.spec, image_id)

    async def _drop(self, saved: SavedState, *, sweep: bool = True) -> None:
        async with self._in_use(saved.id):  # while it has the tags of both kinds, others may not sweep it
            await self._commits.hide(saved)
        if sweep:
            await self._sweep()

    async def _sweep(self) -> None:
        """Remove the states that no container needs any more. Whoever uses one without a container says so before it
        becomes an origin, and until there is a container: hence the order."""
        origins = await self._commits.all("origin")
        if not origins:
            return
        used = self._used()
        needed: set[str] = set()
        for entry in await self._containers.labelled(f"atoll.installation={self._settings.installation_id()}"):
            needed |= {str(entry.get("ImageID", "")), str((entry.get("Labels") or {}).get(ORIGIN, ""))}
        for saved in origins:
            if saved.id not in used and saved.image_id not in needed:
                await self._commits.untag(saved, "origin")

    @asynccontextmanager
    async def _kept(
        self, handle: Handle, checkpoint: str | None, made_by: str = "snapshot"
    ) -> AsyncIterator[SavedState]:
        """Yield a checkpoint, or the current state. Until the context ends it is kept, whatever is deleted."""
        if checkpoint is not None:
            async with self._held(lambda: self._find(handle, checkpoint)) as state:
                yield state
            return
        async with self._swept(), AsyncExitStack() as use:
            async with self._alone(handle):
                container = await self._container(handle)
                described = await self._described(handle, container, "", made_by)
                await use.enter_async_context(self._in_use(described.id))
                state = await finish(self._commits.commit(container, described, "origin"))
            yield state

    @asynccontextmanager
    async def _held(self, find: Callable[[], Awaitable[SavedState]]) -> AsyncIterator[SavedState]:
        """Yield an existing state. Until the context ends it is kept, even if it is deleted."""
        state = await find()
        async with self._swept(), self._in_use(state.id):
            if (await find()).id != state.id:
                raise ConflictError("the state has just been replaced by another one", hint="Try again.")
            yield state

    @asynccontextmanager
    async def _swept(self) -> AsyncIterator[None]:
        """Sweep when the context ends. The block decides whether the operation has failed: what could not be swept is
        left to the next sweep."""
        try:
            yield
        except EngineUnavailableError:
            raise  # another request would wait for the engine again
        except BaseException:
            await finish(self._sweep_if_possible())
            raise
        await finish(self._sweep_if_possible())

    async def _sweep_if_possible(self) -> None:
        with suppress(EngineError, RefusedError):
            await self._sweep()

    def _in_use(self, state_id: str) -> AbstractAsyncContextManager[None]:
        """Keep others from sweeping a state until the context ends, or until this process dies."""
        return self._uses.alone(f"{state_id}.{os.urandom(6).hex()}")

    def _used(self) -> set[str]:
        """Return the ids of the states that are in use, and forget those whose user died."""
        used = set()
        for name in os.listdir(self._settings.engine_run_dir(_USES)):
            with self._uses.at_once(name) as abandoned:
                if abandoned:
                    self._uses.home(name).rmdir()
                else:
                    used.add(name.partition(".")[0])
        return used

    @asynccontextmanager
    async def _exported(self, saved: SavedState) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield all files of a state as a tar archive, from a container that never runs."""
        name = f"{self._who('x').container}-export-{os.urandom(6).hex()}"
        labels = {INSTALLATION: self._settings.installation_id(), **maker_label()}
        body = {
            "Image": saved.image_id,
            "Entrypoint": ["/none"],
            "Labels": labels,
            "HostConfig": {"NetworkMode": "none"},
        }
        try:
            await self._containers.make(name, body)
        except RefusedError as error:
            raise EngineError(f"the Docker engine cannot read the state: {error.message}") from error
        try:
            yield self._http.stream(f"/containers/{name}/export", _EXPORT_S)
        finally:
            await finish(self._containers.remove(name))

    async def _write_tree(self, saved: SavedState, file: Path) -> None:
        async with self._exported(saved) as pieces:
            with file.open("wb") as target:
                async for piece in pieces:
                    await workers.run(workers.TRANSFER, target.write, piece)

    def _freshener(self, sandbox_id: str) -> Prepare:
        return lambda name: fresh_identity.freshen(self._http, name, sandbox_id)


def _parent(container: Mapping[str, Any], known: Sequence[SavedState]) -> str | None:
    """Return the id of the last checkpoint of this container, or else of the state that the container was created
    from."""
    began = image_archive.moment(container.get("Created"))
    later = [saved for saved in known if saved.created_at > began]
    if later:
        return later[-1].id
    return next((saved.id for saved in known if saved.image_id == container["Image"]), None)


def no_memory() -> UnsupportedError:
    return UnsupportedError(
        "the memory of a sandbox cannot be saved with engine 'docker'",
        hint="Engine 'oci' can, with isolation='gvisor'.",
    )
