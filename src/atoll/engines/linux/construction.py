"""Creating a sandbox: from its record to an agent that answers. If that fails, nothing is left.

The record is written before anything is made, and everything that is made is named after the sandbox. So the teardown
finds it all, whether a step failed here or the process was killed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.host import exclusion, process_ref
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux import network_link
from atoll.engines.linux.launcher import Launcher, Progress
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Base, Record
from atoll.engines.linux.states.checkpoints import Checkpoints
from atoll.engines.linux.states.saved_state import SavedState
from atoll.engines.linux.teardown import Teardown
from atoll.errors import EngineError, SandboxError, SpecError
from atoll.images import Image, ImageConfig, Kind
from atoll.model import EffectiveLimits, ImageDefaults, SandboxSpec, check_variables, resolved
from atoll.waiting import Deadline

_CREATE_S = 30.0
_UNDO_S = 30.0


def first_record(
    sandbox_id: str,
    spec: SandboxSpec,
    runtime: str,
    defaults: EffectiveLimits,
    source: SavedState | None,
    ready_key: str = "",
) -> Record:
    """Return the record of a sandbox that is about to be made. `source` is the saved state that it starts from, and
    `ready_key` names the memory that may be kept of it once it is ready."""
    now, lifetime = time.time(), spec.limits.lifetime_s
    return Record(
        sandbox_id=sandbox_id,
        spec=spec,
        defaults=defaults.limits,
        left_out=defaults.left_out,
        account=spec.account,
        runtime=runtime,
        created_at=now,
        expires_at=None if lifetime is None else now + lifetime,
        expires_now=None if lifetime is None else time.clock_gettime(time.CLOCK_BOOTTIME) + lifetime,
        boot_id=process_ref.boot_id(),
        creator=process_ref.this_process(),
        origin=source.id if source is not None else None,
        base=source.base if source is not None else None,
        inherited_bytes=source.size_bytes if source is not None else 0,
        origin_bytes=source.size_bytes if source is not None else 0,
        memory=source.id if source is not None and source.memory and source.runtime == runtime else None,
        ready_key=ready_key,
        prewarmed=source is not None and source.kind == "ready",
    )


class Construction:
    def __init__(
        self, layout: SandboxLayout, checkpoints: Checkpoints, teardown: Teardown, has_users: Callable[[str], bool]
    ) -> None:
        self._layout = layout
        self._checkpoints = checkpoints
        self._teardown = teardown
        self._has_users = has_users

    async def make(self, record: Record, launcher: Launcher, source: SavedState | None) -> Record:
        """Make a new sandbox and return its complete record. A failure or a cancellation leaves nothing behind."""
        sandbox_id = record.sandbox_id
        lock = self._layout.records.begin(record)
        try:
            if source is not None:
                await finish(workers.run(workers.ENGINE, self._checkpoints.begin_with, sandbox_id, source))
            return await self.launch(record, launcher)
        except BaseException as error:
            unwanted = self._layout.exclusion.is_being_deleted(sandbox_id)
            await self._undo(sandbox_id, error)
            if unwanted and isinstance(error, Exception):
                raise exclusion.deleted(sandbox_id) from error
            if isinstance(error, OSError | RuntimeError) and not isinstance(error, SandboxError):
                raise EngineError(f"the sandbox could not be made: {error}") from error
            raise
        finally:
            os.close(lock)

    async def launch(self, record: Record, launcher: Launcher) -> Record:
        """Start the sandbox of this record, for the first time or again, and return the completed record, which has
        been written to disk. The caller must hold the lock of the sandbox."""
        deadline = Deadline.after(_CREATE_S)
        check_volumes(record.spec)
        image = await _acquire_image(self._layout, record)
        record = self._resolved(record, image)
        birth = _Birth(self._layout, record)
        try:
            async with self._layout.group_lock.claimed(deadline):
                init = await launcher.start(record, image, birth.progress, deadline)
        finally:
            connected = await birth.connected()
        late = launcher.connects_late and record.spec.network != "none"
        if late and network_link.network_of(init.pid) not in connected:
            await self.connect(record, init)
        return birth.complete(init)

    def _resolved(self, record: Record, image: Image | None) -> Record:
        """Return the record with the image, and with what its configuration decides, so that both stay the same for as
        long as the sandbox exists."""
        base = record.base if record.base is not None or image is None else Base.of(image, record.spec.image)
        if base is not None:
            check_variables(base.env)
        defaults = ImageDefaults() if base is None else base.defaults
        spec = resolved(record.spec, defaults, has_users=self._has_users(record.runtime))
        return record.model_copy(update={"base": base, "spec": spec})

    async def connect(self, record: Record, init: ProcessRef) -> None:
        """Connect a running sandbox to the network."""
        await finish(workers.run(workers.ENGINE, network_link.attach, self._layout.gateway, record, init))

    async def _undo(self, sandbox_id: str, error: BaseException) -> None:
        try:
            await finish(self._teardown.erase_held(sandbox_id, Deadline.after(_UNDO_S)))
        except Exception as leftover:  # report the first error; `gc` finds what is left
            error.add_note(f"and cleaning up failed: {leftover}")


class _Birth:
    """The record of a sandbox that is being made, updated as the launcher reports progress."""

    def __init__(self, layout: SandboxLayout, record: Record) -> None:
        self._layout = layout
        self._record = record
        self._connecting: list[asyncio.Future[int | None]] = []
        self.progress = Progress(self._connect, self._note_first)

    def _connect(self, pid: int) -> None:
        # The network namespace exists already, so it is connected while the rest of the sandbox is made.
        if self._record.spec.network != "none":
            work = workers.run(workers.ENGINE, network_link.attach_early, self._layout.gateway, self._record, pid)
            self._connecting.append(asyncio.ensure_future(work))

    async def connected(self) -> list[int | BaseException | None]:
        """Wait for the connections that were begun. Return the network namespaces that now have a link."""
        return await asyncio.gather(*self._connecting, return_exceptions=True)

    def _note_first(self, pid: int) -> bool:
        init = ProcessRef.of(pid)
        if init is None:
            return False
        # Without a control group a process can be found only by its id, so the id is recorded before it is certain that
        # the process becomes the agent.
        self._write(init, half_made=not self._layout.hierarchy.controllers)
        return True

    def complete(self, init: ProcessRef) -> Record:
        if self._record.init != init or self._record.half_made:
            self._write(init, half_made=False)
        return self._record

    def _write(self, init: ProcessRef, *, half_made: bool) -> None:
        done = {"init": init, "half_made": half_made, "restoring": None, "memory": None, "asleep": False}
        done["limits_before"] = None  # a group that is made anew has the limits of the record
        self._record = self._record.model_copy(update=done)
        self._layout.records.write(self._record)


def check_volumes(spec: SandboxSpec) -> None:
    """Raise SpecError for a volume that does not exist, or that the launcher would refuse."""
    for volume in spec.volumes:
        if volume.name:
            continue
        if not os.path.exists(volume.host):
            raise SpecError(f"the volume's directory '{volume.host}' does not exist on this machine")
        if (real := os.path.realpath(volume.host)) != os.path.normpath(volume.host):
            # The launcher would refuse it too, because another sandbox may have made that link.
            raise SpecError(
                f"the path of the volume '{volume.host}' goes through a symbolic link",
                hint=f"If you trust it, name the real path: {real}",
            )
        if not volume.read_only and os.geteuid() == 0:
            _check_owner(volume.host, os.stat(volume.host))


def _check_owner(path: str, info: os.stat_result) -> None:
    """Raise SpecError if a writable volume belongs to the host's root.

    The launcher would refuse it too: inside, the owner of a writable volume is root.
    """
    if info.st_uid == 0 or info.st_gid == 0:
        whose = "root" if info.st_uid == 0 else "root's group"
        raise SpecError(
            f"the volume '{path}' belongs to {whose}, so a sandbox may not write to it",
            hint=f"Give it to an ordinary user ('chown USER:GROUP {path}'), or mount it read-only.",
        )


async def _acquire_image(layout: SandboxLayout, record: Record) -> Image | None:
    """Return the image below a sandbox's layer, or None for the image `host`. The base of a saved state is looked up
    by its digest."""
    base = record.base
    if base is None:
        if record.spec.image == "host":
            return None
        return await layout.images.acquire(record.spec.image, record.sandbox_id)
    if not base.digest:
        return None
    layers = await layout.images.lease(record.sandbox_id, base.digest)
    return Image(base.image, Kind.TAR, base.digest, layers, ImageConfig(env=base.env))
