"""One sandbox of one engine: what names it, and the limits that hold for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from atoll.model.image_defaults import ImageDefaults, default_user
from atoll.model.spec import DEFAULT_WORK_DIR, Limits, SandboxSpec
from atoll.model.state import Cause, Observation, State

OWN_LABELS = "atoll."
"""What labels begin with that belong to Atoll. Users cannot set them."""
NAME_LABEL = "atoll.name"
"""The label that holds the name of a sandbox."""
MANAGER_LABEL = "atoll.manager"
"""The label that says which manager a sandbox belongs to. Names of such sandboxes are their manager's matter."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Names one sandbox of one engine. Plain data: it can be written down and used by another process."""

    engine: str
    sandbox_id: str
    spec: SandboxSpec
    created_at: float
    details: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        """The name that was chosen for the sandbox."""
        return self.spec.labels.get(NAME_LABEL)

    @property
    def isolation(self) -> str | None:
        """The isolation level that the sandbox has. None: the engine has not noted it, and the spec asks for none."""
        return self.details.get(ISOLATION, self.spec.isolation)

    @property
    def image_defaults(self) -> ImageDefaults:
        """What the sandbox's image says about sandboxes made from it."""
        return image_defaults(self.details)

    @property
    def is_prewarmed(self) -> bool:
        """Whether the sandbox started from the memory of one that was ready, so that everything runs already."""
        return PREWARMED in self.details

    def limits(self) -> EffectiveLimits:
        """The limits that hold, whether they were asked for or are the engine's defaults."""
        return effective_limits(self.spec, self.details)


DEFAULTS, LEFT_OUT = "default_limits", "limits_left_out"
"""Keys in the details of a handle: the default limits that the engine set, and the defaults that it cannot enforce."""
ISOLATION = "isolation"
"""Key in the details of a handle: the isolation level that the sandbox has, whether or not its spec asked for one."""

PREWARMED = "prewarmed"
"""Key in the details of a handle: the saved state of a ready sandbox that the sandbox started from."""
IMAGE = "image"
"""Key in the details of a handle: the `ImageDefaults` of the sandbox's image, in JSON."""


def image_defaults(details: dict[str, str]) -> ImageDefaults:
    """Return what the details of a handle say about the image. Those of earlier versions say nothing."""
    try:
        return ImageDefaults.model_validate_json(details[IMAGE])
    except (KeyError, ValueError):
        return ImageDefaults()


@dataclass(frozen=True, slots=True)
class EffectiveLimits:
    limits: Limits
    """The limits that are enforced."""
    left_out: tuple[str, ...] = ()
    """The names of defaults that cannot be enforced here. Only the size of the machine limits these."""


def effective_limits(spec: SandboxSpec, details: dict[str, str]) -> EffectiveLimits:
    limits = spec.limits.over(_limits(details[DEFAULTS])) if DEFAULTS in details else spec.limits
    return EffectiveLimits(limits, tuple(details.get(LEFT_OUT, "").split()))


@lru_cache(maxsize=64)  # an engine's defaults are the same for all of its sandboxes
def _limits(text: str) -> Limits:
    return Limits.model_validate_json(text)


@dataclass(frozen=True, slots=True)
class SandboxDetails:
    """What a sandbox is and has. Only its limits can change."""

    id: str
    engine: str
    image: str
    isolation: str | None
    """The isolation level that the sandbox has: `namespaces`, `gvisor` or `vm`. None: it is not isolated at all, which
    only the engine `unsafe-none` does."""
    limits: Limits
    """The limits that are enforced, whether they were asked for or are the engine's defaults."""
    limits_left_out: tuple[str, ...] = ()
    """The names of default limits that cannot be enforced here."""
    work_dir: str = DEFAULT_WORK_DIR
    """The directory where commands and relative paths start."""
    user: str | None = None
    """The user that commands run as if they name none. None: root, or the only user inside."""
    image_defaults: ImageDefaults = field(default_factory=ImageDefaults)
    """What the image says about sandboxes made from it: its digest, entry point, ports and labels."""

    @classmethod
    def of(cls, handle: Handle) -> SandboxDetails:
        """Return the properties of the sandbox that this handle names."""
        held = handle.limits()
        return cls(
            id=handle.sandbox_id,
            engine=handle.engine,
            image=handle.spec.image,
            isolation=handle.details.get("isolation", handle.spec.isolation),
            limits=held.limits,
            limits_left_out=held.left_out,
            work_dir=handle.spec.directory,
            user=default_user(handle.spec),
            image_defaults=handle.image_defaults,
        )


@dataclass(frozen=True, slots=True)
class ListedSandbox:
    """A sandbox in a list: how to find it, and how it is."""

    id: str
    """The id by which `attach` finds it."""
    engine: str
    image: str
    state: State
    cause: Cause | None
    """Why it ended, if it has."""
    reason: str
    """The cause in words."""
    created_at: float
    """When it was created, in seconds since 1970."""
    name: str | None
    labels: dict[str, str]

    @classmethod
    def of(cls, handle: Handle, seen: Observation) -> ListedSandbox:
        # Atoll's own labels are shown only as what they mean.
        labels = {name: value for name, value in handle.spec.labels.items() if not name.startswith(OWN_LABELS)}
        return cls(
            handle.sandbox_id,
            handle.engine,
            handle.spec.image,
            seen.state,
            seen.cause,
            seen.reason,
            handle.created_at,
            handle.name,
            labels,
        )
