"""The steps of a build: what changes files, with every word substituted, and the key under which its result is kept.

The key of a step is the digest of the key of the step before it and of everything that decides what comes out: the
instruction, the environment, the user, the work directory, and the contents that are copied. Instructions that change
only the configuration, such as CMD and LABEL, are no steps.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.builds.dockerfile.instructions import Heredoc, Place
from atoll.images import Image, ImageConfig

if TYPE_CHECKING:
    from atoll.builds.dockerfile.ignore import IgnoreRules

_FORMAT = "atoll-step-1"


def key_of(*parts: object) -> str:
    """Return the key of a step that is determined by these values, which JSON can write down."""
    text = json.dumps((_FORMAT, *parts), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where files come from that are not in the sandbox: the context, an earlier stage, or an image."""

    kind: str
    """`context`, `stage` or `image`."""
    stage: StagePlan | None = None
    image: Image | None = None

    def key(self) -> str:
        if self.stage is not None:
            return self.stage.files_key
        return self.image.digest if self.image is not None else ""


@dataclass(frozen=True, slots=True)
class RunMount:
    """A mount of a RUN step, with its words substituted."""

    type: str
    target: str
    id: str = ""
    source: str = ""
    origin: Origin | None = None
    writable: bool = False
    sharing: str = "shared"
    mode: int | None = None
    uid: int = 0
    gid: int = 0
    size_bytes: int | None = None
    env: str = ""
    required: bool = False
    digest: str = ""
    """Of what is mounted from the context."""


@dataclass(frozen=True, slots=True)
class RunCommand:
    argv: tuple[str, ...]
    env: dict[str, str]
    proxies: dict[str, str]
    user: str
    work_dir: str
    network: str
    mounts: tuple[RunMount, ...] = ()
    script: Heredoc | None = None
    """A here-document that is a program of its own, run as a file."""


@dataclass(frozen=True, slots=True)
class CopyFiles:
    sources: tuple[str, ...]
    target: str
    """An absolute path inside. It ends with a slash if it is to be a directory."""
    origin: Origin
    heredocs: tuple[Heredoc, ...] = ()
    is_add: bool = False
    owner: str = ""
    mode: int | None = None
    exclude: IgnoreRules | None = None


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: str
    owner: str = ""
    """The user that it belongs to if it is new. Empty: root."""


Action = RunCommand | CopyFiles | MakeDirectory


@dataclass(slots=True)
class Step:
    number: int
    stage: str
    place: Place
    text: str
    action: Action
    key: str

    @property
    def where(self) -> str:
        return f"{self.place.file}:{self.place.line}"

    def stages(self) -> list[StagePlan]:
        """Return the stages that it reads from."""
        origins = [self.action.origin] if isinstance(self.action, CopyFiles) else []
        if isinstance(self.action, RunCommand):
            origins = [mount.origin for mount in self.action.mounts if mount.origin is not None]
        return [origin.stage for origin in origins if origin.stage is not None]


@dataclass(slots=True)
class StagePlan:
    name: str
    image: Image | None
    """The image that it starts from, if that is no stage."""
    spec_image: str
    """What a sandbox of that image is asked for by."""
    parent: StagePlan | None
    """The stage that it starts from."""
    base_key: str
    config: ImageConfig
    steps: list[Step] = field(default_factory=list)
    renewal: tuple[str, str] | None = None
    """The key of its first step, and what a build without the cache puts in its place."""

    @property
    def files_key(self) -> str:
        """The key of its files at the end."""
        return self.steps[-1].key if self.steps else self.base_key

    def last_step(self) -> Step | None:
        """Return the step that makes its files, which may be one of an earlier stage."""
        return self.steps[-1] if self.steps else (self.parent.last_step() if self.parent is not None else None)

    def start(self) -> StagePlan:
        """Return the stage below it that starts from an image."""
        return self if self.parent is None else self.parent.start()
