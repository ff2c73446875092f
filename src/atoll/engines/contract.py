"""The contract between Atoll and whatever makes sandboxes."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from atoll.errors import UnsupportedError
from atoll.model import (
    Capability,
    Cause,
    EffectiveLimits,
    Handle,
    ImageProgress,
    Limits,
    Observation,
    SandboxSpec,
    Stats,
)
from atoll.model.checkpoint import Change, Checkpoint, Snapshot
from atoll.model.network_policy import NetworkPolicy
from atoll.network.refusals import Refusal

ByteStream = socket.socket
"""A connected, non-blocking stream socket to a sandbox's agent. An engine without one bridges a socket pair."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine is on this machine."""

    capabilities: frozenset[Capability]
    isolation: str | None
    """The level that a sandbox has which asks for none: `namespaces`, `gvisor` or `vm`. None: no wall at all."""
    version: str | None = None
    """The version of the program or service that makes the sandboxes. None: it is part of Atoll, or unknown."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether an engine can work on this machine, and what to do if it cannot."""

    name: str
    available: bool
    reasons: tuple[str, ...] = ()
    """Why the engine is not available. For an available engine: what its users should know."""
    hints: tuple[str, ...] = ()
    """What to do about the reasons, as commands where possible."""
    version: str | None = None
    """The version of the program that makes the sandboxes."""


@runtime_checkable
class Engine(Protocol):
    """Makes and destroys sandboxes, and hands over a byte stream to the agent inside. Nothing else.

    Everything a user does inside a sandbox is spoken over the stream, so an engine knows nothing of commands or files.

    All methods may be called concurrently and for different sandboxes in any order. Each has a deadline of its own and
    raises only errors of `atoll.errors`. Cancelling a call leaves nothing half made: a cancelled `create` has removed
    what it made before the cancellation is seen by the caller. The contract is checked by `atoll.conformance`.
    """

    name: str

    async def describe(self) -> EngineDescription:
        """What the engine is and can do here. Quick after the first call.

        An engine whose service does not answer describes what is certain of it, and looks again at a later call; it
        raises EngineUnavailableError if nothing is.
        """

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        """Make a sandbox whose agent can be reached. A failure leaves nothing behind.

        Raises UnsupportedError for a control it cannot enforce, ImageNotFoundError, EngineUnavailableError when
        something is missing on this machine, EngineError otherwise.
        """

    async def connect(self, handle: Handle) -> ByteStream:
        """A new stream to the agent; again and again, also from another process than the one that created it.

        Raises SandboxGoneError with the cause when the sandbox has ended, AgentUnreachableError when it does not
        answer.
        """

    async def inspect(self, handle: Handle) -> Observation:
        """The state, and the cause when it is dead, which is no error. MISSING for a sandbox that was deleted."""

    async def list(self) -> list[Handle]:
        """Everything of this installation that exists, alive or dead, also what an earlier process made."""

    async def stats(self, handle: Handle) -> Stats: ...

    async def delete(self, handle: Handle) -> None:
        """End it and remove every trace. Always legal, always safe to repeat; when it returns nothing is left."""

    async def aclose(self) -> None:
        """Let go of what this object holds (not of the sandboxes). May be repeated."""


@runtime_checkable
class Pausable(Protocol):
    """An engine that can stop all of a sandbox's processes and let them go on. Needs `Capability.PAUSE`."""

    async def pause(self, handle: Handle) -> None: ...

    async def resume(self, handle: Handle) -> None: ...


@runtime_checkable
class Leasing(Protocol):
    """An engine whose idle sandboxes are ended elsewhere, such as by a server."""

    async def keep_alive(self, handle: Handle, seconds: float) -> None:
        """Count the sandbox as in use for this many seconds from now."""


@runtime_checkable
class PortExposing(Protocol):
    """An engine on a server that leads to ports of its sandboxes."""

    async def expose_port(self, handle: Handle, name: str, port: int) -> None:
        """Give a port of the sandbox a name and a URL."""

    async def port_link(self, handle: Handle, port: int, lifetime_s: float) -> str:
        """A URL that leads to this port for so long and needs no credential. The port is exposed if it is not."""


@runtime_checkable
class NetworkPolicies(Protocol):
    """An engine that enforces network policies. Needs `Capability.NETWORK`.

    A policy is that of the sandbox, not of its process: it is the same after a pause, a rollback, a restart of ours,
    and for what is forked from it.
    """

    async def set_network(self, handle: Handle, policy: NetworkPolicy) -> None:
        """From now on. Connections that it forbids are ended. UnsupportedError if this sandbox can get no link."""

    async def refusals(self, handle: Handle) -> Sequence[Refusal]:
        """What was refused, oldest first. Bounded: of very many the oldest are forgotten."""


@runtime_checkable
class Resizable(Protocol):
    """An engine that can give limits to a sandbox that runs without them."""

    async def set_limits(self, handle: Handle, limits: Limits) -> None:
        """From now on these hold for memory, processors and processes. Raises UnsupportedError for what it cannot
        enforce, and for limits that were there before or are set when a sandbox is made."""


OnImageProgress = Callable[[ImageProgress], None]


@runtime_checkable
class ImageSource(Protocol):
    """An engine that can get an image ready before a sandbox is made from it."""

    async def ensure_image(self, image: str, on_progress: OnImageProgress | None = None) -> None:
        """Pull or build it if it is not here. Raises ImageError if it cannot be had."""


@runtime_checkable
class OwnDefaultImage(Protocol):
    """An engine without the image `host`: a sandbox that names no other starts from this one, as its handle says."""

    @property
    def default_image(self) -> str: ...


@runtime_checkable
class EventSource(Protocol):
    """An engine whose sandboxes are elsewhere, and which says when something happened to one that nobody asked for."""

    def announce(self, on_change: Callable[[str], None]) -> None:
        """From now on, in this event loop, with the sandbox's id. It is a hint to look, and may come for nothing."""


@runtime_checkable
class Reachable(Protocol):
    """An engine that is told over HTTP by the other side what happened, if there is a URL at which it can be."""

    def receive_at(self, url: str) -> None:
        """Before `announce`."""

    def receive(self, signature: str, body: bytes) -> str | None:
        """A message that came there; what to answer. SandboxError if it is not from the other side."""


@runtime_checkable
class GarbageCollecting(Protocol):
    """An engine that can remove what nobody owns any more: the remains of calls that were killed in the middle."""

    async def gc(self, *, shared: bool = True) -> Sequence[str]:
        """What was removed, each with a word on why. Touches nothing that is not of this installation, and nothing that
        a living process makes, changes or deletes just now. Takes a bounded time; the rest is for the next call.

        Without `shared` what sandboxes use together, and none uses now, is kept for the next.
        """


@runtime_checkable
class Balancing(Protocol):
    """An engine that shares the processors between accounts."""

    async def balance(self) -> None:
        """Weigh each account by what it has used since the last call. A manager calls it about twice a second."""


@runtime_checkable
class Checkpointing(Protocol):
    """An engine that can keep states of a sandbox's files. Needs `Capability.CHECKPOINTS`.

    A state is atomic: all that was written before a moment, nothing after. What a call that was killed in the middle
    left is never listed. Deleting a state never affects another, nor a sandbox that came from it.
    """

    async def checkpoint(
        self, handle: Handle, *, name: str = "", made_by: str = "user", memory: bool = False
    ) -> Checkpoint:
        """Without stopping it. With `memory` also of what runs: then it stands still for a moment, nobody may be
        connected to it, and UnsupportedError says if its isolation has no such power."""

    async def checkpoints(self, handle: Handle) -> Sequence[Checkpoint]:
        """Oldest first."""

    async def delete_checkpoint(self, handle: Handle, checkpoint_id: str) -> None:
        """May be repeated."""

    async def rollback(self, handle: Handle, checkpoint_id: str | None) -> None:
        """End its processes, give it the files of then (None: as it was made), and start it again with the same id.

        If we die in the middle, the next use of the sandbox completes it.
        """

    async def fork(
        self,
        handle: Handle,
        sandbox_ids: Sequence[str],
        checkpoint_id: str | None,
        *,
        memory: bool = False,
        labels: Sequence[Mapping[str, str]] = (),
    ) -> Sequence[Handle]:
        """New sandboxes from a checkpoint (None: from now, with `memory` also what runs). All of them, or none.

        With `labels`, one for each, they have these instead of the source's.
        """

    async def hibernate(self, handle: Handle) -> None:
        """Pause it, with its memory on the disk; `resume` brings it back. UnsupportedError as for `checkpoint`."""

    async def diff(self, handle: Handle, old: str, new: str | None, *, text: bool) -> Sequence[Change]:
        """From one checkpoint to another (None: to now), by path."""

    async def snapshot(self, handle: Handle, name: str, checkpoint_id: str | None, *, memory: bool = False) -> Snapshot:
        """Keep a state under a name, independent of the sandbox. `SandboxSpec.image` may then be `snapshot:NAME`.

        With `memory` (from now, or from a checkpoint that has it) processes go on in sandboxes of the same isolation.
        """

    async def snapshots(self) -> Sequence[Snapshot]: ...

    async def delete_snapshot(self, name: str) -> None:
        """May be repeated."""

    async def export_snapshot(self, name: str, file: Path) -> None:
        """To a file that `import_snapshot` understands on another machine. It appears as a whole."""

    async def import_snapshot(
        self, file: Path, name: str, *, most_bytes: int | None = None, memory: bool = False
    ) -> Snapshot:
        """Checked against its own digest; hostile content does no harm. ImageError if it unpacks to more.

        The memory in it, if there is any, is taken over only with `memory`: it is for files that are trusted.
        """


@runtime_checkable
class Lookup(Protocol):
    """An engine that can look for one sandbox, which is quicker than listing all, or finds more than it lists."""

    async def find(self, sandbox_id: str) -> Handle | None: ...


_DECLARED_BY: Mapping[type[Any], Capability] = {
    Pausable: Capability.PAUSE,
    NetworkPolicies: Capability.NETWORK,
    Checkpointing: Capability.CHECKPOINTS,
}
"""The protocols whose support depends on the machine, each with the capability that declares it."""

Supported = TypeVar("Supported")


async def supporting(engine: Engine, protocol: type[Supported]) -> Supported | None:
    """The engine as one that supports this protocol (one of those above); None if it does not, on this machine."""
    if not isinstance(engine, protocol):
        return None
    declared = _DECLARED_BY.get(protocol)
    if declared is not None and declared not in (await engine.describe()).capabilities:
        return None
    return engine


async def checkpointing(engine: Engine, where: str = "here") -> Checkpointing:
    """The engine as one that keeps states. Raises UnsupportedError if it cannot."""
    keeper = await supporting(engine, Checkpointing)
    if keeper is None:
        raise UnsupportedError(
            f"engine '{engine.name}' cannot keep states of a sandbox {where}",
            hint="Engines 'native' and 'oci' can, as root and with btrfs-progs installed.",
        )
    return keeper


_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


@dataclass(frozen=True, slots=True)
class LimitEvents:
    """How often a sandbox's limits were hit since it was made."""

    oom_kills: int = 0
    pids_refused: int = 0
    disk_full: bool = False
    """Right now: nobody counts the writes that were refused."""

    def cause_since(self, before: LimitEvents, said: str) -> Cause | None:
        """The limit that a failed command hit since then, if any. `said` is what it wrote to standard error: a disk
        that was full already is the cause only if the command complains of it."""
        if self.oom_kills > before.oom_kills:
            return Cause.OUT_OF_MEMORY
        if self.pids_refused > before.pids_refused:
            return Cause.PIDS
        if self.disk_full and (not before.disk_full or any(text in said for text in _DISK_FULL)):
            return Cause.DISK_FULL
        return None


@runtime_checkable
class LimitReporting(Protocol):
    """An engine that knows whether a limit was hit: compared before and after a command that failed, it tells why.

    What ends the sandbox as a whole is told by `inspect`.
    """

    async def limit_events(self, handle: Handle, *, killed: bool = False) -> LimitEvents:
        """Asked around every command of a sandbox with limits, so it has to be quick. Of one that is gone: nothing.
        `killed`: a command has just been killed, and an engine that hears of the reason late may wait for it."""


@runtime_checkable
class SetsUp(Protocol):
    """An engine whose sandboxes have been set up when `create` returns: the setup commands of the spec have run."""

    sets_up: Literal[True]


@runtime_checkable
class LimitDefaults(Protocol):
    """An engine that limits sandboxes that ask for no limits."""

    async def default_limits(self, spec: SandboxSpec) -> EffectiveLimits:
        """The limits of a sandbox of this spec where the spec has none."""

    async def shared_ceilings(self) -> tuple[str, ...]:
        """Which of `memory`, `pids` and `cpu` it can bound for all sandboxes of an account together."""
