"""What is asked of a builder, what it reports on the way, and what it returns: plain values."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from atoll.images import Image
from atoll.model import Limits
from atoll.model.network_policy import NetworkPolicy, Rule


class Supplies(Protocol):
    """What RUN steps get of this machine's own configuration of package managers. Nothing of it stays in an image."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Contents of files by their paths inside. They are there only while a RUN runs."""

    @property
    def secrets(self) -> Sequence[str]:
        """Passwords and tokens among them, which are hidden in the output of commands."""

    @property
    def rules(self) -> Sequence[Rule]:
        """What RUN steps may reach in addition to the build's own policy."""


NameBase = Callable[[str], Awaitable[str]]
"""Returns the name that an image of FROM or `--from` has on this machine, and raises SandboxError for one that whoever
asked for the build may not use."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A build. Whoever asks for it is not trusted: its commands run in sandboxes with these limits."""

    context: Path
    """A directory of this machine. Links in it that lead out of it are not followed."""
    dockerfile: str | bytes | None = None
    """A path in the context, or the text itself. None: `Dockerfile`."""
    name: str = ""
    """The name of the image. Empty: a name made from the digest of its steps."""
    args: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    """Secrets by id. They are never in a layer, in the key of a step, in an event or on a command line."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the image, beside those of the Dockerfile, over which they win."""
    target: str = ""
    """The stage to build. Empty: the last."""
    no_cache: bool = False
    network: NetworkPolicy = "none"
    """What RUN steps may reach."""
    mirrors: Supplies | None = None
    use_mirrors: bool | tuple[str, ...] | None = None
    """Without `mirrors`: whether RUN steps get this machine's configuration of package managers, or what it says of
    these hosts. None: as ATOLL_BUILD_MIRRORS says, by default not."""
    account: str = ""
    """Whose share of the machine the build uses."""
    owner: str = ""
    """Whose image it becomes, and whose cached steps and caches are used. Empty: everybody's on this machine."""
    limits: Limits = field(default_factory=Limits)
    """The limits of each sandbox of the build. One that is not named has the default of sandboxes."""
    timeout_s: float = 3600.0
    """How long the whole build may take."""
    step_timeout_s: float | None = None
    """How long one RUN may take. None: as long as the build."""
    name_base: NameBase | None = None
    """Called with the name of each base. None: they are used as they are."""
    keep_failed: bool = False
    """Whether the sandbox of a failed step is kept, for a shell. `BuildError.sandbox_id` names it; delete it."""


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Something that happened in a build."""

    kind: Literal["plan", "step", "cached", "output", "done", "failed", "progress", "warning"]
    """`plan`: `steps` steps are to be done. `step`: one begins. `cached`: it is known already. `output`: what it
    writes. `done`: it has ended. `failed`: the build has failed, which is the last event. `progress`: a base image is
    being fetched. `warning`: something that does not stop the build."""
    text: str = ""
    """The instruction, the output or the message."""
    stage: str = ""
    step: int = 0
    """The number of the step, from 1 on, in the whole build; 0: it concerns no step."""
    steps: int = 0
    place: str = ""
    """FILE:LINE of the instruction."""
    channel: int = 1
    """Of output: 1 for stdout, 2 for stderr."""
    seconds: float = 0.0
    """How long a step took that is done."""
    time: float = field(default_factory=time.time)


OnBuildEvent = Callable[[BuildEvent], None]
"""Called in the event loop of the build. It must not block."""


@dataclass(frozen=True, slots=True)
class BuiltImage:
    image: Image
    steps: int
    cached: int
    """How many of the steps were not carried out, because their results were known."""
    seconds: float
