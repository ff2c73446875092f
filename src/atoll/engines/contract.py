"""The contract between Atoll and its engines.

`Engine` is what every engine implements. The other protocols are optional: an engine implements those that it supports,
and `supporting` finds out whether it does on this machine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from atoll.engines.checkpointing import Checkpointing
from atoll.engines.limit_events import LimitEvents
from atoll.engines.named_volumes import NamedVolumes
from atoll.errors import UnsupportedError
from atoll.model import (
    Capability,
    EffectiveLimits,
    Handle,
    ImageProgress,
    Limits,
    ListedSandbox,
    Observation,
    SandboxSpec,
    Stats,
)
from atoll.model.network_policy import NetworkPolicy
from atoll.network.refusals import Refusal

if TYPE_CHECKING:
    from atoll.images import Image, ImageConfig, Images

ByteStream = socket.socket
"""A connected, non-blocking stream socket to a sandbox's agent. An engine that reaches its agents in another way
returns one end of a socket pair and forwards the bytes of the other."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The properties of an engine on this machine."""

    capabilities: frozenset[Capability]
    isolation: str | None
    """The isolation level of a sandbox whose spec names none: `namespaces`, `gvisor` or `vm`. None: the engine does not
    isolate at all."""
    version: str | None = None
    """The version of the program or service that makes the sandboxes. None: it is part of Atoll, or its version is
    unknown."""
    is_complete: bool = True
    """Whether the service behind the engine answered. If not, it may have capabilities that are not listed."""
    changeable_limits: frozenset[str] = frozenset()
    """The limits that `Resizable.set_limits` can change, by their names in `Limits`, for sandboxes of that isolation
    level. Empty: none."""
    missing: Mapping[Capability, str] = field(default_factory=dict)
    """Why capabilities are missing on this machine, as far as the reasons are known."""


@runtime_checkable
class Engine(Protocol):
    """An engine creates and deletes sandboxes, and opens byte streams to the agents inside.

    Everything a user does inside a sandbox is sent over such a stream, so an engine knows nothing of commands or files.

    All methods may be called concurrently, and in any order for different sandboxes. Each has a deadline of its own and
    raises only errors of `atoll.errors`. Cancelling a call leaves nothing half made: before a cancelled `create` raises
    CancelledError, it removes whatever it has made. `atoll.conformance` checks this contract.
    """

    name: str

    async def describe(self) -> EngineDescription:
        """Return the engine's capabilities, isolation level and version on this machine.

        May be called often: calls after the first are quick. While the service behind an engine does not answer, the
        engine describes only what is certain and tries again at a later call. Raises EngineUnavailableError if nothing
        is certain.
        """

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        """Create a sandbox, and return once its agent can be reached. A failure leaves nothing behind.

        Not repeatable: an id that is in use is refused, and the sandbox that has it goes on. Raises SpecError for an
        invalid id or spec, UnsupportedError for a limit or feature that the engine cannot enforce,
        ImageNotFoundError if there is no such image, EngineUnavailableError if something is missing on this machine,
        and EngineError otherwise.
        """

    async def connect(self, handle: Handle) -> ByteStream:
        """Open a new stream to the sandbox's agent.

        May be called any number of times, also by another process than the one that created the sandbox. Raises
        SandboxGoneError with the cause if the sandbox has ended, and AgentUnreachableError if its agent does not
        answer.
        """

    async def inspect(self, handle: Handle) -> Observation:
        """Return the state of the sandbox and, if it has ended, the cause.

        A sandbox that has ended is not an error, nor is one that was deleted: its state is `MISSING`. May be repeated.
        Raises EngineError if the engine cannot find out.
        """

    async def list(self) -> list[Handle]:
        """Return the handles of all sandboxes of this installation that exist, whether they run or have ended.

        Sandboxes that an earlier process made are included, those of other installations are not. May be repeated.
        """

    async def stats(self, handle: Handle) -> Stats:
        """Return the resources that the sandbox uses now. A value that the engine cannot know is None.

        May be repeated. A sandbox that has ended or was deleted is not an error.
        """

    async def delete(self, handle: Handle) -> None:
        """End the sandbox and remove every trace of it. When this returns, nothing is left.

        Allowed in every state and repeatable, also for a sandbox that never existed. Another operation that is in
        progress on the sandbox is given up. Raises EngineError if something cannot be removed; call it again then.
        """

    async def aclose(self) -> None:
        """Release the connections, threads and files that this object holds. Sandboxes go on. May be repeated."""


@runtime_checkable
class IsolationLevels(Protocol):
    """An engine whose sandboxes may have one of several isolation levels, which differ in what can be enforced."""

    async def levels(self) -> Mapping[str, EngineDescription]:
        """Describe the engine at each isolation level that it has on this machine. The first is that of a sandbox whose
        spec names none. May be repeated."""


@runtime_checkable
class Pausable(Protocol):
    """An engine that can pause and resume sandboxes. It declares `Capability.PAUSE` where it can."""

    async def pause(self, handle: Handle) -> None:
        """Stop all processes of the sandbox. When this returns, nothing runs inside.

        May be repeated. Raises SandboxGoneError if the sandbox has ended, and UnsupportedError if this machine does not
        allow pausing.
        """

    async def resume(self, handle: Handle) -> None:
        """Let the processes of a paused sandbox continue, also after `hibernate`.

        May be repeated, and has no effect on a sandbox that is not paused. Raises SandboxGoneError if the sandbox has
        ended.
        """


@runtime_checkable
class Leasing(Protocol):
    """An engine whose idle sandboxes are ended by another program, such as a server."""

    async def keep_alive(self, handle: Handle, seconds: float) -> None:
        """Let the sandbox count as in use for this many seconds from now. May be repeated to renew the lease.

        Raises SandboxNotFoundError or SandboxGoneError if the sandbox no longer exists.
        """


@runtime_checkable
class PortExposing(Protocol):
    """An engine whose sandboxes are on a server that can expose their ports.

    Both methods may be repeated, and raise SandboxNotFoundError or SandboxGoneError if the sandbox no longer exists,
    and LimitReachedError if it has as many exposed ports as the server allows.
    """

    async def expose_port(self, handle: Handle, name: str, port: int) -> None:
        """Make a port of the sandbox available under a name and a URL. A port that has this name is replaced."""

    async def port_link(self, handle: Handle, port: int, lifetime_s: float) -> str:
        """Return a URL that leads to this port for `lifetime_s` seconds without any other credential.

        The port is exposed first if it is not exposed yet. Every call returns a new link.
        """


@runtime_checkable
class NetworkPolicies(Protocol):
    """An engine that enforces network policies. It declares `Capability.NETWORK` where it can.

    A policy belongs to the sandbox, not to its processes: it outlives a pause, a rollback and a restart of the program
    that uses the engine, and a fork has the policy of its source.
    """

    async def set_network(self, handle: Handle, policy: NetworkPolicy) -> None:
        """Replace the sandbox's network policy. Open connections that the new policy forbids are closed.

        May be repeated. Raises UnsupportedError if the engine cannot enforce the policy for this sandbox, or cannot
        connect it to the network any more, and SandboxGoneError if the sandbox was deleted.
        """

    async def refusals(self, handle: Handle) -> Sequence[Refusal]:
        """Return the network log of the sandbox: the refusals, oldest first. May be repeated.

        The log is bounded; when it is full, its oldest entries are dropped.
        """


@runtime_checkable
class Resizable(Protocol):
    """An engine that can change limits of a sandbox. `EngineDescription.changeable_limits` names them.

    Like a network policy, limits belong to the sandbox and not to its processes: a changed limit outlives a pause, a
    rollback and a restart of the program that uses the engine, and a fork has the limits of its source.
    """

    async def set_limits(self, handle: Handle, limits: Limits) -> Handle:
        """Change the limits that `limits` names and leave the others as they are. Return the new handle.

        All of them are changed or none, also if the caller is cancelled or dies. May be repeated, and works while the
        sandbox is paused in memory. Raises UnsupportedError, which names the limits, for those that the engine cannot
        enforce or that can only be set when a sandbox is made; SandboxResourceError for a limit below what the sandbox
        uses now; SandboxPausedError if the sandbox was paused to disk, and SandboxGoneError if it has ended.
        """


@runtime_checkable
class Building(Protocol):
    """An engine whose sandboxes' files can become images of this machine, step by step.

    A step is a saved state that is kept under a key in the build cache of this installation. New sandboxes start from
    it by `SandboxSpec(image="step:KEY")`, which no user can name.
    """

    async def save_step(self, handle: Handle, key: str) -> None:
        """Keep the present files of the sandbox under this key. If there is a step of this key already, keep that one.

        May be called while the sandbox runs. A step is complete or not there at all.
        """

    async def has_step(self, key: str) -> bool:
        """Return whether there is a step of this key, and count that as a use of it. May be repeated."""

    async def commit_step(self, key: str, name: str, config: ImageConfig, *, owner: str = "") -> Image:
        """Store the files of a step as the image `name` of this machine, above the image that its first sandbox was
        made from, and return it. An image that has this name is replaced. `owner` is the user that it belongs to."""

    def step_view(self, key: str) -> AbstractContextManager[int]:
        """Provide a descriptor of the files of a step, merged with those of its image, for reading. Nothing in it leads
        out of it if it is read with `atoll.archive.root`. Entering blocks."""

    async def prune_steps(self, keep_bytes: int | None = 0, *, unused_s: float = 0.0) -> int:
        """Remove the least recently used steps until the rest takes at most `keep_bytes` (None: what the
        settings allow). Steps that sandboxes use stay, and those used within the last `unused_s` seconds, but with None
        only as far as they take no more than twice that. Return how many bytes were freed."""


@runtime_checkable
class ImageKeeping(Protocol):
    """An engine whose images are in the image store of this machine."""

    @property
    def images(self) -> Images:
        """The images, which other engines of this installation share."""


OnImageProgress = Callable[[ImageProgress], None]


@runtime_checkable
class ImageSource(Protocol):
    """An engine that can prepare an image before a sandbox is made from it."""

    async def ensure_image(self, image: str, on_progress: OnImageProgress | None = None) -> None:
        """Pull or build the image unless it is on this machine already. May be repeated.

        `on_progress` is called for every step. Raises ImageError if the image cannot be pulled or built, and
        ImageNotFoundError if there is none of that name.
        """


@runtime_checkable
class OwnDefaultImage(Protocol):
    """An engine without the image `host`."""

    @property
    def default_image(self) -> str:
        """The image of a sandbox whose spec names none. The spec in its handle then contains this image."""


@runtime_checkable
class EventSource(Protocol):
    """An engine whose sandboxes are on another machine, and which reports changes that its user did not cause."""

    def announce(self, on_change: Callable[[str], None]) -> None:
        """From now on, call `on_change` with the id of each sandbox that may have changed.

        Call this once, in the event loop that is to run `on_change`. A report is only a hint to call `inspect`: the
        sandbox may turn out to be unchanged.
        """


@runtime_checkable
class Reachable(Protocol):
    """An `EventSource` to which the remote server can send webhooks, if it is given a URL for them."""

    def receive_at(self, url: str) -> None:
        """Set the URL at which webhooks for this engine arrive. Has no effect after `announce`."""

    def receive(self, signature: str, body: bytes) -> str | None:
        """Process a webhook that arrived at that URL, and return the challenge to answer with, if there is one.

        Raises SandboxError if the message is not from the remote server. A message that arrives a second time is
        refused.
        """


@runtime_checkable
class GarbageCollecting(Protocol):
    """An engine that can remove the remains of calls whose process was killed half-way."""

    async def gc(self, *, shared: bool = True) -> Sequence[str]:
        """Remove what belongs to no sandbox any more, and return a short description of each thing removed.

        May be called at any time and repeated. It touches nothing of other installations, and nothing that a living
        process is making, changing or deleting. It takes a bounded time, and leaves the rest to the next call.

        With `shared=False`, resources that sandboxes share and that none uses now are kept for the next sandbox.
        """


@runtime_checkable
class Balancing(Protocol):
    """An engine that divides the CPUs of the machine between accounts."""

    async def balance(self) -> None:
        """Adjust each account's share of the CPUs to what it has used since the last call.

        A manager calls this about twice a second.
        """


@runtime_checkable
class Listing(Protocol):
    """An engine that knows of sandboxes of its user that other programs made, and lists those too."""

    async def listing(self) -> Sequence[ListedSandbox]:
        """Return all sandboxes of the user. May be repeated."""


@runtime_checkable
class Lookup(Protocol):
    """An engine that can find a single sandbox, which is quicker than listing all or finds more than `list` does."""

    async def find(self, sandbox_id: str) -> Handle | None:
        """Return the handle of this sandbox, or None if there is no such sandbox. May be repeated."""


_DECLARED_BY: Mapping[type[Any], Capability] = {
    Pausable: Capability.PAUSE,
    NetworkPolicies: Capability.NETWORK,
    Checkpointing: Capability.CHECKPOINTS,
    Building: Capability.CHECKPOINTS,
    NamedVolumes: Capability.NAMED_VOLUMES,
}
"""The protocols whose support depends on the machine, each with the capability that an engine then declares."""

Supported = TypeVar("Supported")


async def supporting(engine: Engine, protocol: type[Supported]) -> Supported | None:
    """Return the engine, typed as `protocol` (one of those above), or None if it does not support it on this
    machine."""
    if not isinstance(engine, protocol):
        return None
    declared = _DECLARED_BY.get(protocol)
    if declared is not None and declared not in (await engine.describe()).capabilities:
        return None
    return engine


async def checkpointing(engine: Engine, where: str = "here") -> Checkpointing:
    """Return the engine, typed as `Checkpointing`. Raises UnsupportedError if it cannot save states."""
    keeper = await supporting(engine, Checkpointing)
    if keeper is None:
        raise UnsupportedError(
            f"engine '{engine.name}' cannot save the state of a sandbox {where}",
            hint="Engines 'native' and 'oci' can, as root and with btrfs-progs installed.",
        )
    return keeper


async def building(engine: Engine) -> Building:
    """Return the engine, typed as `Building`. Raises UnsupportedError if it cannot make images of sandboxes."""
    builder = await supporting(engine, Building)
    if builder is None:
        raise UnsupportedError(
            f"engine '{engine.name}' cannot build images here",
            hint="Engines 'native' and 'oci' can, as root and with btrfs-progs installed.",
        )
    return builder


async def having_volumes(engine: Engine, where: str = "here") -> NamedVolumes:
    """Return the engine, typed as `NamedVolumes`. Raises UnsupportedError if it has none."""
    found = await supporting(engine, NamedVolumes)
    if found is None:
        raise UnsupportedError(
            f"engine '{engine.name}' has no named volumes {where}",
            hint="Engines 'native' and 'oci' have them, as root and with btrfs-progs installed, and engine 'docker'.",
        )
    return found


@runtime_checkable
class LimitReporting(Protocol):
    """An engine that knows how often limits were hit. Comparing the counts before and after a failed command shows
    why it failed.

    A limit that ends the whole sandbox is reported by `inspect`.
    """

    async def limit_events(self, handle: Handle, *, killed: bool = False) -> LimitEvents:
        """Return the events since the sandbox was made. For a sandbox that is gone all counts are zero.

        Called before and after every command of a sandbox with limits, so it has to be quick. `killed` says that a
        command has just been killed: an engine that learns the cause late may then wait for it.
        """


@runtime_checkable
class SetsUp(Protocol):
    """An engine whose `create` runs the setup commands of the spec itself, before it returns."""

    sets_up: Literal[True]


@runtime_checkable
class LimitDefaults(Protocol):
    """An engine that applies default limits where a spec names none. Both methods may be repeated."""

    async def default_limits(self, spec: SandboxSpec) -> EffectiveLimits:
        """Return the default limits that a sandbox of this spec would get, and those that cannot be enforced."""

    async def shared_ceilings(self) -> tuple[str, ...]:
        """Return which of `memory`, `pids` and `cpu` the engine can limit for all sandboxes of an account together."""
