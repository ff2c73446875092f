"""Writes docs/concepts/options.md: every option of a new sandbox, and what it is called in each surface.

The options are those of the code: parameters, fields and flags. Where a surface lacks an option, a reason has to be
written down here; otherwise, or if the reason has become wrong, this is an error. With --check nothing is written.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from atoll import AsyncSandbox
from atoll.cli.options import SandboxFlags, flag_of
from atoll.manager import SandboxManager, SandboxOptions
from atoll.model.manus_names import SandboxNames
from atoll.service.models.sandbox_request import SandboxRequest
from generated import write_or_check

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs/concepts/options.md"
SURFACES = ("`Sandbox(…)`", "`create_sandbox(…)`", "`POST /sandboxes`", "`run`, `create`, `shell`")
SDK, MANAGER, REST, CLI = SURFACES
SAME = {
    "config": "spec",
    "file": "spec",
    "sandbox_spec_id": "spec",
    "settings": "spec",
    "volume_bindings": "volumes",
    "memory_bytes": "memory",
    "disk_bytes": "disk",
    "lifetime_s": "lifetime",
    "setup_timeout_s": "setup_timeout",
    "idle_timeout_s": "idle_timeout",
    "exposed_ports": "ports",
}
"""Names that mean an option of another name."""
_SERVED = "only a server passes it on"
_OF_ENGINE = "an option of the manager's engine"
_ENDS = "only a manager or a server ends idle sandboxes"
REASONS: dict[str, dict[str, str]] = {
    "engine": {REST: "the server's operator chooses the engine"},
    "server": {MANAGER: _OF_ENGINE, REST: "the address of the request", CLI: "`atoll --server` or `ATOLL_URL`"},
    "api_key": {MANAGER: _OF_ENGINE, REST: "the header `Authorization`", CLI: "`ATOLL_API_KEY`"},
    "installation": {MANAGER: "`SandboxManager(settings=…)`", REST: "the server's own", CLI: "`ATOLL_DATA_DIR` …"},
    "timeout": {REST: "`timeout` of each command", CLI: "`--timeout` of `run` and `exec`"},
    "owner": {SDK: "there is one user", REST: "the caller", CLI: "there is one user"},
    "key": {SDK: "no request is repeated", REST: "the header `Idempotency-Key`", CLI: "no request is repeated"},
    "idle_timeout": {SDK: _ENDS, CLI: _ENDS},
    "on_idle": {SDK: _ENDS, CLI: _ENDS},
    "services": {SDK: _ENDS, REST: "the exposed ports", CLI: _ENDS},
    "registry_login": {SDK: "`docker login`", MANAGER: "`docker login`", CLI: "`docker login`"},
    "health": {SDK: "the program asks itself", MANAGER: "the program asks itself", CLI: "specs have it"},
    "callback": {SDK: _SERVED, MANAGER: _SERVED, CLI: "specs have it"},
    "telemetry": {SDK: _SERVED, MANAGER: _SERVED, CLI: "only requests have it"},
}
"""Why a surface lacks an option."""


@dataclass(slots=True)
class Surface:
    """The names of each option in one surface."""

    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, shown: str, option: str | None = None) -> None:
        self.names.setdefault(option or SAME.get(name, name), []).append(f"`{shown}`")


def sdk() -> Surface:
    found = Surface()
    for name, parameter in inspect.signature(AsyncSandbox).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            found.add(name, name, "installation" if name == "settings" else None)
    return found


def manager() -> Surface:
    found = Surface()
    for name, parameter in inspect.signature(SandboxManager.create_sandbox).parameters.items():
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
            found.add(name, name)
    for name in sorted(SandboxOptions.__optional_keys__ - SandboxNames.__optional_keys__):
        found.add(name, name)
    return found


def rest() -> Surface:
    found = Surface()
    for name in SandboxRequest.model_fields:
        found.add(name, name)
    return found


def command_line() -> Surface:
    found = Surface()
    for each in fields(SandboxFlags):
        found.add(each.name, flag_of(each.name))
    found.add("sandbox_spec_id", "--spec")
    return found


def surfaces() -> dict[str, Surface]:
    return {SDK: sdk(), MANAGER: manager(), REST: rest(), CLI: command_line()}


def problems(found: Mapping[str, Surface]) -> Iterator[str]:
    """Yield what is wrong: empty cells without a reason, and reasons for cells that are not empty."""
    options = {option for surface in found.values() for option in surface.names}
    for option in sorted(options):
        for surface in SURFACES:
            is_there, reason = option in found[surface].names, REASONS.get(option, {}).get(surface)
            if not is_there and reason is None:
                yield f"{option}: {surface} lacks it, and REASONS does not say why"
            if is_there and reason is not None:
                yield f"{option}: {surface} has it, but REASONS says why not"
    yield from (f"{option}: REASONS names it, but no surface has it" for option in sorted(REASONS.keys() - options))


HEADER = """# Options of a sandbox

A new sandbox is described by the same options wherever it is made: by `Sandbox` and `AsyncSandbox`, by a manager, by a
request to a server, and by the flags of `atoll run`, `create` and `shell`. This table is generated from the code. Where
a surface lacks an option, the cell says what is there instead, or why.

Times are in seconds. Sizes are bytes, or text such as `512m` and `2g`. A request to a server has the options at the top
level, as in `{"memory": "1g", "lifetime": 600}`, or in `settings`.

"""


def generate(found: Mapping[str, Surface]) -> str:
    order = [*found[SDK].names]
    order += [option for surface in SURFACES for option in found[surface].names if option not in order]
    rows = [f"| option | {' | '.join(SURFACES)} |", "|---|---|---|---|---|"]
    for option in dict.fromkeys(order):
        cells = [", ".join(found[each].names.get(option, ())) or f"*{REASONS[option][each]}*" for each in SURFACES]
        rows.append(f"| {option} | {' | '.join(cells)} |")
    return HEADER + "\n".join(rows) + "\n"


def main() -> int:
    found = surfaces()
    if wrong := list(problems(found)):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    return write_or_check(TARGET, generate(found))


if __name__ == "__main__":
    raise SystemExit(main())
