"""Choose a service by the variables that OpenHands reads: `RUNTIME`, `OH_SANDBOX_…` and `SANDBOX_…`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from atoll.compat.openhands.config import SandboxConfig
from atoll.compat.openhands.managed_service import ManagedSandboxService
from atoll.compat.openhands.openhands_services import (
    DockerSandboxService,
    ProcessSandboxService,
    RemoteSandboxService,
)
from atoll.compat.openhands.values import ExposedPort, VolumeMount
from atoll.errors import SpecError

_PREFIX = "OH_SANDBOX_"
_KINDS: dict[str, type[ManagedSandboxService]] = {
    "docker": DockerSandboxService,
    "process": ProcessSandboxService,
    "local": ProcessSandboxService,
    "remote": RemoteSandboxService,
}
_LISTS: dict[str, Any] = {"mounts": list[VolumeMount], "exposed_ports": list[ExposedPort]}
_NOT_FROM_ENV = ("sandbox_spec_service", "config", "settings", "manager", "user_id", "network")


def sandbox_service(environ: Mapping[str, str] | None = None, **given: Any) -> ManagedSandboxService:
    """Return the service that the environment chooses. `given` overrides its settings. Raises SpecError for invalid
    settings."""
    environ = os.environ if environ is None else environ
    kind = _kind(environ)
    values = _values(environ, kind)
    config = given.pop("config", None) or SandboxConfig.from_env(environ)
    web_url = environ.get("OH_WEB_URL") or (f"https://{host}" if (host := environ.get("WEB_HOST")) else None)
    if kind is RemoteSandboxService:
        values.setdefault("api_url", environ.get("SANDBOX_REMOTE_RUNTIME_API_URL", ""))
        values.setdefault("api_key", environ.get("SANDBOX_API_KEY", ""))
        for name in ("api_url", "api_key"):
            if not values[name] and name not in given:
                variable = {"api_url": "SANDBOX_REMOTE_RUNTIME_API_URL", "api_key": "SANDBOX_API_KEY"}[name]
                raise SpecError(f"a remote service needs {variable}", hint="It is the URL or a key of an Atoll server.")
    return kind(**{"web_url": web_url, **values, "config": config, **given})


def _kind(environ: Mapping[str, str]) -> type[ManagedSandboxService]:
    chosen = environ.get(f"{_PREFIX}KIND")
    if chosen is not None:
        by_name = {kind.__name__: kind for kind in _KINDS.values()}
        found = by_name.get(chosen.removesuffix("Injector"))
        if found is None:
            raise SpecError(f"invalid {_PREFIX}KIND={chosen}: use one of {', '.join(by_name)}")
        return found
    runtime = environ.get("RUNTIME") or "docker"
    if runtime not in _KINDS:
        raise SpecError(f"invalid RUNTIME={runtime}: use one of {', '.join(_KINDS)}")
    return _KINDS[runtime]


def _values(environ: Mapping[str, str], kind: type[ManagedSandboxService]) -> dict[str, Any]:
    known = {field.name: field for field in fields(kind) if field.name not in _NOT_FROM_ENV}
    values: dict[str, Any] = {}
    parts: dict[str, dict[int, dict[str, str]]] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or name == "kind" or name.startswith("spec_"):
            continue
        if found := re.fullmatch(r"(mounts|exposed_ports)_([0-9]{1,3})_(\w+)", name):
            parts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = text
        elif name in _LISTS:
            values[name] = _checked(variable, _LISTS[name], json.loads(text))
        elif name in known:
            values[name] = _checked(variable, _scalar(kind, name), text)
        else:
            raise SpecError(f"{kind.__name__} has no setting {variable}", hint=f"It has {', '.join(sorted(known))}.")
    for name, numbered in parts.items():
        each = [numbered[number] for number in sorted(numbered)]
        values[name] = _checked(f"{_PREFIX}{name.upper()}", _LISTS[name], each)
    return values


def _scalar(kind: type[ManagedSandboxService], name: str) -> Any:
    return {"max_num_sandboxes": int, "resource_factor": int}.get(
        name, float if name in ("startup_grace_seconds", "polling_interval", "start_sandbox_timeout") else str
    )


def _checked(variable: str, kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise SpecError(f"{variable}: {error.errors()[0]['msg']}") from error
