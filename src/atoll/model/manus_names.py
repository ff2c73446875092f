"""Translation of the names that the Manus example uses for sandboxes and commands to Atoll's own.

The example describes a sandbox as `{image, resources: {cpu, memory: "4G", disk: "20G"}, timeout: 3600, network:
{allowOutbound, allowedDomains}}`, where `timeout` is its lifetime, and runs a command with `{timeout, captureOutput}`.
All code that accepts a description as data passes it through here, so the same names are accepted everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from atoll.errors import SpecError
from atoll.model.spelling import renamed

LIMITS = ("memory_bytes", "cpus", "pids", "disk_bytes", "inodes", "open_files", "shm_bytes", "lifetime_s")
_LIMIT_NAMES = {
    "cpu": "cpus",
    "memory": "memory_bytes",
    "disk": "disk_bytes",
    "shm": "shm_bytes",
    "timeout": "lifetime_s",
    "lifetime": "lifetime_s",
}
LIMIT_OPTIONS = {"memory": "memory_bytes", "cpus": "cpus", "pids": "pids", "disk": "disk_bytes"}
"""The limits that are options of a sandbox, and their names in `Limits`."""
_OPTION_NAMES = {"cpu": "cpus", "memory_bytes": "memory", "disk_bytes": "disk"}
_NETWORK = (
    *("allow_outbound", "network_enabled", "allowed_domains", "denied_domains", "allowed_cidrs", "denied_cidrs"),
    "bytes_per_s",
)
_SHORT = (*LIMITS, *_NETWORK, "resources")
_OTHERS = {**_LIMIT_NAMES, "working_dir": "work_dir", "setup_timeout": "setup_timeout_s"}
_KEYWORDS = ("engine", "server", "api_key", "settings", "timeout", "task_id")
_EXEC = ("timeout", "env", "cwd", "user", "stdin", "on_stdout", "on_stderr", "max_output_bytes")
_OF_A_REQUEST = ("name", "labels", "task_id", "ports", "idle_timeout", "on_idle")
"""Options of a request for a sandbox that may also be among its settings."""
_SANDBOX = "a sandbox"
_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
TASK_LABEL = "task_id"
"""The label that holds the id of the task for which a sandbox was made."""


class SandboxNames(TypedDict, total=False):
    """Keyword arguments that use the example's names instead of Atoll's."""

    cpu: float | None
    resources: Mapping[str, object] | None
    allowOutbound: bool | None
    allowedDomains: list[str] | None
    taskId: str | None
    workDir: str | None


class CommandNames(TypedDict, total=False):
    captureOutput: bool


def settings(values: Mapping[Any, Any], fields: Collection[str]) -> dict[str, Any]:
    """Translate a description of a sandbox to the names in `fields`, those of `SandboxSpec` or of a part of it.

    Raises SpecError for unknown names and for settings that are given twice.
    """
    has_labels = "labels" in fields
    plain = renamed(values, {*fields, *_SHORT, *(("task_id",) * has_labels)}, _OTHERS, of=_SANDBOX, others=_KEYWORDS)
    if (task := plain.pop("task_id", None)) is not None:
        plain["labels"] = {**(plain.get("labels") or {}), TASK_LABEL: task_id(task)}
    if isinstance(volumes := plain.get("volumes"), Mapping):
        plain["volumes"] = [f"{host}:{path}" for host, path in volumes.items()]
    limits = {name: plain.pop(name) for name in LIMITS if name in plain}
    network = {name: plain.pop(name) for name in _NETWORK if name in plain}
    resources = plain.pop("resources", None)
    if resources is not None:
        limits = _joined(limits, _limits(resources, "resources"), "resources")
    if limits or isinstance(plain.get("limits"), Mapping):
        given = plain.get("limits")
        limits = limits if given is None else _joined(limits, _limits(given, "limits"), "limits")
        plain["limits"] = limits
    for name, value in limits.items():
        if isinstance(value, bool) and not name.endswith("_bytes"):  # the validator of sizes has a better message
            raise SpecError(f"{name} must be a number, not {value!r}")
    if network:
        given = plain.get("network")
        if given is not None and not isinstance(given, Mapping):
            raise SpecError(
                f"{next(iter(network))!r} and 'network' both set the network of {_SANDBOX}", hint="Give only one."
            )
        plain["network"] = _joined(network, dict(given or {}), "network")
    return plain


def captures(names: Mapping[str, object], given: bool | None) -> bool:
    """Return whether the output of a command is kept, given in either spelling. Raises SpecError."""
    values: dict[str, object] = {} if given is None else {"capture_output": given}
    found = renamed({**values, **names}, ("capture_output",), of="a command", others=_EXEC).get("capture_output", True)
    if not isinstance(found, bool):
        raise SpecError(f"capture_output must be true or false, not {found!r}")
    return found


def is_plain(text: str) -> bool:
    """Return whether a text is a valid task id, which can also serve as a file name."""
    return _TASK.fullmatch(text) is not None


def task_id(value: object) -> str:
    """Validate a task id. Raises SpecError."""
    if not isinstance(value, str) or not is_plain(value):
        raise SpecError(
            f"{str(value)[:80]!r} cannot be the id of a task",
            hint="Use up to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit.",
        )
    return value


def start(values: Mapping[Any, Any], fields: Collection[str], described: Collection[str]) -> dict[str, Any]:
    """Translate a request for a sandbox to the names in `fields`.

    The names in `described`, which describe the sandbox itself, are moved into `settings`; `timeout` becomes
    `lifetime`. Raises SpecError if the sandbox is described in two ways.
    """
    known = {*fields, *described, *_SHORT, "ports"} - {"lifetime_s"}
    own = {**_OTHERS, "timeout": "lifetime", "lifetime_s": "lifetime", "idle_timeout_s": "idle_timeout"}
    del own["lifetime"]

    def translated(given: Mapping[Any, Any]) -> dict[str, Any]:
        return renamed(given, known, own, of="a request for a sandbox")

    plain = translated(values)
    settings = plain.get("settings")
    if isinstance(settings, Mapping):
        plain = _joined(plain, {name: settings[name] for name in _OF_A_REQUEST if name in settings}, "settings")
        plain["settings"] = {name: value for name, value in settings.items() if name not in _OF_A_REQUEST}
    if isinstance(ports := plain.pop("ports", None), Mapping):
        if plain.get("exposed_ports"):
            raise SpecError("'ports' and 'exposed_ports' both name ports", hint="Give only one of them.")
        plain["exposed_ports"] = [{"name": name, "port": port} for name, port in ports.items()]
    elif ports is not None:
        raise SpecError(f"ports are an object such as {{'WEB': 8000}}, not {str(ports)[:80]!r}")
    inside = {name: plain.pop(name) for name in list(plain) if name not in fields}
    for other in ("settings", "sandbox_spec_id"):
        if inside and plain.get(other) is not None:
            written = next(name for name in values if not translated({name: None}).keys().isdisjoint(inside))
            raise SpecError(
                f"{other!r} and {written[:80]!r} both describe the sandbox",
                hint="Put all of it into 'settings'." if other == "settings" else "Give only one of them.",
            )
    return {**plain, "settings": inside} if inside else plain


def limit_options(values: Mapping[Any, Any], fields: Collection[str]) -> dict[str, Any]:
    """Translate limits to the names in `fields`, those of options."""
    plain = renamed(values, fields, _OPTION_NAMES, of="a change of limits", others=LIMITS)
    for name, value in plain.items():
        if isinstance(value, bool):
            raise SpecError(f"{name} must be a number, not {value!r}")
    return plain


def _limits(given: Any, what: str) -> dict[str, Any]:
    if hasattr(given, "model_dump"):
        given = given.model_dump(exclude_none=True)
    if not isinstance(given, Mapping):
        raise SpecError(f"{what} is an object with names such as 'cpu' and 'memory', not {str(given)[:80]!r}")
    return renamed(given, LIMITS, _LIMIT_NAMES, of=what)


def _joined(first: dict[str, Any], second: dict[str, Any], what: str) -> dict[str, Any]:
    twice = [name for name in second if name in first]
    if twice:
        raise SpecError(f"{twice[0]!r} is given twice, by itself and in {what!r}", hint="Give only one of them.")
    return {**first, **second}
