"""Requests for sandboxes, validated before anything is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack, runtime_checkable

from atoll.engines import registry
from atoll.errors import SpecError
from atoll.manager.context import ManagerContext
from atoll.manager.record import OnIdle, Operation, Record, fingerprint
from atoll.model import MANAGER_LABEL, NAME_LABEL, OWN_LABELS, SandboxSpec
from atoll.model.spec import OWNER_LABEL, unnamed
from atoll.model.spelling import renamed
from atoll.sandbox.options import SpecOptions, checked_name, spec_of, volumes_of
from atoll.sandbox.sandbox_access import new_sandbox_id

_MAX_CHARACTERS = 512
# With MANAGER_LABEL, NAME_LABEL and OWNER_LABEL, this label describes a sandbox if the journal is lost.
LIFETIME_LABEL = f"{OWN_LABELS}lifetime"


@runtime_checkable
class SpecSource(Protocol):
    """Settings that can be converted to a spec, such as those of `atoll.compat.openmanus`."""

    timeout: int
    """Default timeout of commands, in seconds."""

    def spec(self) -> SandboxSpec: ...


class SharedOptions(SpecOptions, total=False):
    """Options of a sandbox that may exist already: those that describe it, and these."""

    owner: str | None
    timeout: float | None
    """Default timeout of commands."""
    engine: str | None
    """The name of an engine other than the manager's own."""


class SandboxOptions(SharedOptions, total=False):
    """Options of a new sandbox: those that describe it, and these."""

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


_MANAGED = ("owner", "timeout", "engine", "key", "idle_timeout", "on_idle", "services")
"""The options that do not describe the sandbox."""
_WITH_CONFIG = ("labels", "env", "lifetime", "name", "task_id", "setup", "start", "ready", "ports")
"""The options that add to a config. Others cannot be given beside one."""
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
        if self.name is not None:
            checked_name(self.name)
        for what, text in (("owner", self.owner), ("key", self.key)):
            if text is not None and not 0 < len(text) <= _MAX_CHARACTERS:
                raise SpecError(f"the {what} must have 1 to {_MAX_CHARACTERS} characters")
        for label, value in self.spec.labels.items():
            if not label or len(label) > _MAX_CHARACTERS or len(value) > _MAX_CHARACTERS:
                raise SpecError(
                    f"the label {label[:80]!r} must have 1 to {_MAX_CHARACTERS} characters, and its value at most that"
                )
            if label.startswith(OWN_LABELS):
                raise SpecError(f"labels that begin with '{OWN_LABELS}' are reserved for Atoll: {label!r}")
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
            unused |= {newer for newer in ("start", "ready", "sudo", "prewarm") if getattr(self.spec, newer) is None}
            body = self.spec.model_dump_json(
                exclude={"account": True, **dict.fromkeys(unused, True), **unnamed(self.spec)}
            )
            object.__setattr__(self, "fingerprint", fingerprint(body, *others))

    @classmethod
    def of(
        cls,
        config: Config = None,
        volume_bindings: Mapping[str, str] | None = None,
        **options: Unpack[SandboxOptions],
    ) -> Request:
        """The request for these options. Raises SpecError for invalid ones."""
        given = renamed(options, SandboxOptions.__optional_keys__, of="create_sandbox")
        managed = {option: given.pop(option) for option in _MANAGED if option in given}
        given = {option: value for option, value in given.items() if value is not None}
        ports: Mapping[str, int] = given.get("ports", {})
        name, lifetime_s = given.pop("name", None), given.pop("lifetime", None)
        timeout_s, engine = managed.get("timeout"), managed.get("engine")
        if timeout_s is None and isinstance(config, SpecSource):
            timeout_s = config.timeout
        spec = spec_of(given) if config is None else _extended(config, given)
        if volume_bindings:
            spec = spec.model_copy(update={"volumes": (*spec.volumes, *volumes_of(volume_bindings))})
        if (own := spec.labels.get(NAME_LABEL)) is not None and MANAGER_LABEL not in spec.labels:
            labels = {label: value for label, value in spec.labels.items() if label != NAME_LABEL}
            name, spec = name or own, spec.model_copy(update={"labels": labels})
        return cls(
            spec,
            name,
            managed.get("owner"),
            managed.get("key"),
            spec.limits.lifetime_s if lifetime_s is None else lifetime_s,
            timeout_s=timeout_s,
            engine=registry.canonical(engine) if engine not in (None, "auto") else None,
            idle_timeout_s=managed.get("idle_timeout"),
            on_idle=managed.get("on_idle"),
            services=(*managed.get("services", ()), *ports.values()),
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
        """Return the account of the owner.

        A spare has no owner, hence no account, and stays without one when it is claimed, because no process is moved
        between control groups.
        """
        if self.owner is None or self.pool is not None:
            return ""
        return account_of(context, self.owner)

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


def _extended(config: SandboxSpec | SpecSource | Mapping[str, object], given: Mapping[str, Any]) -> SandboxSpec:
    """Return the spec of a config and of the options beside it. Raises SpecError for options that exclude one
    another."""
    if others := [option for option in given if option not in _WITH_CONFIG]:
        raise SpecError(
            f"'config' and {', '.join(map(repr, others))} both describe the sandbox", hint="Give only one of them."
        )
    if isinstance(config, SandboxSpec):
        spec = config
    else:
        spec = config.spec() if isinstance(config, SpecSource) else spec_of(config)
    if not given:
        return spec
    for option in ("setup", "start", "ready"):
        if option in given and getattr(spec, option):
            raise SpecError(f"{option} is given twice, by itself and in the config", hint="Give only one of them.")
    added = spec_of(given)
    values = {field: getattr(spec, field) for field in SandboxSpec.model_fields}
    values["labels"] = {**spec.labels, **added.labels}
    values["env"] = {**spec.env, **added.env}
    for option in ("setup", "start", "ready"):
        values[option] = getattr(added, option) or getattr(spec, option)
    return SandboxSpec.of(**values)


def account_of(context: ManagerContext, owner: str) -> str:
    """Return the account of an owner, from which the owner's name cannot be derived."""
    return fingerprint(context.settings.installation_id(), context.manager_id, owner)[:20]


def fork_key(key: str, number: int) -> str:
    """Return the idempotency key of one of several sandboxes that one request creates."""
    return f"{key}#{number}"
