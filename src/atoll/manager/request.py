"""Requests for sandboxes, validated before anything is done."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, runtime_checkable

from atoll.engines import registry
from atoll.errors import SpecError
from atoll.manager.context import ManagerContext
from atoll.manager.record import OnIdle, Operation, Record, fingerprint
from atoll.model import SandboxSpec, Volume
from atoll.model.manus_names import TASK_LABEL
from atoll.model.manus_names import task_id as checked_task_id
from atoll.sandbox.sandbox_access import new_sandbox_id

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_CHARACTERS = 512
_OWN = "atoll."
_PLAIN = SandboxSpec()
MANAGER_LABEL = f"{_OWN}manager"
"""The label by which a manager recognizes its own sandboxes. This one and the following describe a sandbox if the
journal is lost."""
NAME_LABEL = f"{_OWN}name"
OWNER_LABEL = f"{_OWN}owner"
LIFETIME_LABEL = f"{_OWN}lifetime"


@runtime_checkable
class SpecSource(Protocol):
    """Settings that can be converted to a spec, such as those of `atoll.compat.openmanus`."""

    timeout: int
    """Default timeout of commands, in seconds."""

    def spec(self) -> SandboxSpec: ...


class SharedOptions(TypedDict, total=False):
    """Options besides the spec that also make sense if the sandbox may exist already. All times are in seconds."""

    owner: str | None
    labels: Mapping[str, str] | None
    env: Mapping[str, str] | None
    lifetime: float | None
    timeout: float | None
    """Default timeout of commands."""
    engine: str | None
    """The name of an engine other than the manager's own."""


class SandboxOptions(SharedOptions, total=False):
    """Options for a new sandbox besides the spec."""

    name: str | None
    """Unique among the owner's sandboxes."""
    key: str | None
    """The idempotency key: repeating the same request with the same key returns the same sandbox."""
    idle_timeout: float | None
    """The default is the manager's."""
    on_idle: OnIdle | None
    """The default is the manager's."""
    services: Sequence[int]
    """Ports. While something listens on one of them, the sandbox is not ended for being idle."""
    ports: Mapping[str, int] | None
    """Services by name. Each is also an environment variable inside: `NAME=PORT`."""
    task_id: str | None
    """The task that the sandbox is for. The sandbox can be found by it as by a name."""
    setup: Sequence[str] | None
    """Command lines that run before the sandbox is given out."""


Config = SandboxSpec | SpecSource | Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Request:
    spec: SandboxSpec
    """The spec with all environment variables. Its labels are those of the caller."""
    name: str | None = None
    owner: str | None = None
    key: str | None = None
    lifetime_s: float | None = None
    timeout_s: float | None = None
    """Default timeout of commands."""
    pool: str | None = None
    engine: str | None = None
    """None lets the manager choose."""
    idle_timeout_s: float | None = None
    on_idle: OnIdle | None = None
    services: tuple[int, ...] = ()
    origin: str = ""
    """A text that identifies what the sandbox is forked from."""
    fingerprint: str = field(init=False, default="")
    """Hash of everything that was requested, or empty without a key."""

    def __post_init__(self) -> None:
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise SpecError(
                f"{self.name[:80]!r} is not a valid name",
                hint="Use up to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit.",
            )
        for what, text in (("owner", self.owner), ("key", self.key)):
            if text is not None and not 0 < len(text) <= _MAX_CHARACTERS:
                raise SpecError(f"the {what} must have 1 to {_MAX_CHARACTERS} characters")
        for label, value in self.spec.labels.items():
            if not label or len(label) > _MAX_CHARACTERS or len(value) > _MAX_CHARACTERS:
                raise SpecError(
                    f"the label {label[:80]!r} must have 1 to {_MAX_CHARACTERS} characters, and its value at most that"
                )
            if label.startswith(_OWN):
                raise SpecError(f"labels that begin with '{_OWN}' are reserved for Atoll: {label!r}")
        times = {"lifetime": self.lifetime_s, "timeout": self.timeout_s, "idle timeout": self.idle_timeout_s}
        for what, seconds in times.items():
            if seconds is not None and not seconds > 0:
                raise SpecError(f"a {what} must be more than 0 seconds, not {seconds!r}")
        if self.on_idle not in (None, "end", "pause", "disk"):
            raise SpecError(f"on_idle must be 'end', 'pause' or 'disk', not {self.on_idle!r}")
        if self.key is not None:
            engine = None if self.engine is None else registry.oldest_name(self.engine)
            others: tuple[object, ...] = (
                *(self.name, self.owner, self.lifetime_s, self.timeout_s, engine, self.origin),
                *((self.idle_timeout_s, self.on_idle) if self.idle_timeout_s or self.on_idle else ()),
            )
            # Newer fields are left out if unused, so that the fingerprint equals that of an older version.
            unused = set() if self.spec.setup else {"setup", "setup_timeout_s"}
            body = self.spec.model_dump_json(exclude={"account", *unused})
            object.__setattr__(self, "fingerprint", fingerprint(body, *others))

    @classmethod
    def of(
        cls,
        config: Config = None,
        volume_bindings: Mapping[str, str] | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        owner: str | None = None,
        key: str | None = None,
        lifetime: float | None = None,
        timeout: float | None = None,
        engine: str | None = None,
        idle_timeout: float | None = None,
        on_idle: OnIdle | None = None,
        services: Sequence[int] = (),
        task_id: str | None = None,
        setup: Sequence[str] | None = None,
        ports: Mapping[str, int] | None = None,
    ) -> Request:
        """The request for these options, which `SandboxOptions` describes. Raises SpecError for invalid ones."""
        if ports:
            env = {**{variable: str(port) for variable, port in ports.items()}, **(env or {})}
            services = (*services, *ports.values())
        if isinstance(config, SandboxSpec):
            spec = config
        elif not isinstance(config, SpecSource):
            spec = SandboxSpec.described(config) if config is not None else _PLAIN
        else:
            spec = config.spec()
            timeout = config.timeout if timeout is None else timeout
        if task_id is not None:
            labels = {**(labels or {}), TASK_LABEL: checked_task_id(task_id)}
        if volume_bindings or labels or env or setup is not None:
            volumes = tuple(Volume.parse(f"{host}:{path}") for host, path in (volume_bindings or {}).items())
            values = {field: getattr(spec, field) for field in SandboxSpec.model_fields}
            values["volumes"] = (*spec.volumes, *volumes)
            values["labels"] = {**spec.labels, **(labels or {})}
            values["env"] = {**spec.env, **(env or {})}
            if setup is not None:
                if spec.setup:
                    raise SpecError("setup is given twice, by itself and in the config", hint="Give only one of them.")
                values["setup"] = setup
            spec = SandboxSpec.of(**values)
        seconds = spec.limits.lifetime_s if lifetime is None else lifetime
        return cls(
            spec,
            name,
            owner,
            key,
            seconds,
            timeout_s=timeout,
            engine=registry.canonical(engine) if engine is not None else None,
            idle_timeout_s=idle_timeout,
            on_idle=on_idle,
            services=tuple(services),
        )

    @classmethod
    def for_forks(
        cls,
        source: Record,
        count: int,
        checkpoint: str | None,
        memory: bool,
        *,
        names: Sequence[str] = (),
        labels: Sequence[Mapping[str, str]] = (),
        lifetime: float | None = None,
        key: str | None = None,
    ) -> list[Request]:
        """Return requests for forks of a sandbox, which belong to the same owner and get its labels.

        `names` and `labels`, if given, have one entry for each fork.
        """
        return [
            cls(
                source.spec.model_copy(update={"labels": {**source.labels, **(labels[number] if labels else {})}}),
                names[number] if names else None,
                source.owner,
                fork_key(key, number) if key is not None else None,
                source.lifetime_s if lifetime is None else lifetime,
                timeout_s=source.timeout_s,
                engine=source.engine,
                idle_timeout_s=source.idle_timeout_s,
                on_idle=source.on_idle,
                services=source.services,
                origin=f"{source.id} {checkpoint} {memory}",
            )
            for number in range(count)
        ]

    def record(self, context: ManagerContext) -> Record:
        """Return the record of a sandbox that is to be created for this request."""
        marks = {MANAGER_LABEL: context.manager_id, NAME_LABEL: self.name, OWNER_LABEL: self.owner}
        if self.pool is None and self.lifetime_s is not None:
            marks[LIFETIME_LABEL] = f"{self.lifetime_s!r}"
        labels = {**self.spec.labels, **{label: value for label, value in marks.items() if value is not None}}
        # The manager itself enforces the lifetime, because an engine would not know that it was extended.
        limits = self.spec.limits.model_copy(update={"lifetime_s": None})
        record = Record(
            id=new_sandbox_id(),
            engine=self.engine or context.engines.name_for(self.spec),
            spec=self.spec.model_copy(update={"labels": labels, "limits": limits, "account": self._account(context)}),
            act=Operation.CREATE,
            pool=self.pool,
            created_at=context.clock.wall(),
            boot_id=context.clock.boot_id,
        )
        return record if self.pool is not None else record.model_copy(update=self.ownership_fields(context))

    def _account(self, context: ManagerContext) -> str:
        """Return the account of the owner, from which the owner's name cannot be derived.

        A spare has no owner, hence no account, and stays without one when it is claimed, because no process is moved
        between control groups.
        """
        if self.owner is None or self.pool is not None:
            return ""
        return fingerprint(context.settings.installation_id(), context.manager_id, self.owner)[:20]

    def ownership_fields(self, context: ManagerContext) -> dict[str, object]:
        """Return the record fields that give a sandbox to the caller of this request."""
        return {
            "pool": None,
            "name": self.name,
            "owner": self.owner,
            "labels": self.spec.labels,
            "key": self.key,
            "timeout_s": self.timeout_s,
            "idle_timeout_s": self.idle_timeout_s,
            "on_idle": self.on_idle,
            "services": self.services,
            "fingerprint": self.fingerprint,
            "created_at": context.clock.wall(),
            **context.expiry(context.shortened(self.lifetime_s)),
        }


def fork_key(key: str, number: int) -> str:
    """Return the idempotency key of one of several sandboxes that one request creates."""
    return f"{key}#{number}"
