"""Instructions that change only the configuration of the image."""

from __future__ import annotations

import dataclasses
import re

from atoll.builds.dockerfile import durations
from atoll.builds.dockerfile.instructions import (
    Cmd,
    Command,
    DeclaredVolumes,
    Entrypoint,
    Expose,
    Healthcheck,
    Instruction,
    Label,
    Maintainer,
    Shell,
    StopSignal,
    User,
)
from atoll.builds.scope import Expand
from atoll.errors import BuildError
from atoll.images import ImageConfig

DEFAULT_SHELL = ("/bin/sh", "-c")
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/([a-z]+))?\Z", re.IGNORECASE)
_MOST_PORTS = 65_535
_TIMES = {
    "interval": "Interval",
    "timeout": "Timeout",
    "start-period": "StartPeriod",
    "start-interval": "StartInterval",
}


def changed(config: ImageConfig, instruction: Instruction, expand: Expand, *, has_own_cmd: bool) -> ImageConfig | None:
    """Return the configuration after this instruction; None if the instruction is of another kind.

    `has_own_cmd` says whether the stage has had a CMD: ENTRYPOINT ends the CMD of a base image, but not the stage's.
    """
    match instruction:
        case Label():
            labels = {expand(name): expand(value) for name, value in instruction.labels}
            return dataclasses.replace(config, labels=config.labels | labels)
        case Maintainer():
            return config
        case User():
            return dataclasses.replace(config, user=expand(instruction.user))
        case Shell():
            return dataclasses.replace(config, shell=instruction.words)
        case Cmd():
            return dataclasses.replace(config, cmd=command_line(instruction.command, config))
        case Entrypoint():
            entry = command_line(instruction.command, config)
            return dataclasses.replace(config, entrypoint=entry, cmd=config.cmd if has_own_cmd else ())
        case Expose():
            ports = {port for word in instruction.ports for text in expand(word).split() for port in _ports(text)}
            return dataclasses.replace(config, exposed_ports=tuple(sorted({*config.exposed_ports, *ports})))
        case StopSignal():
            return dataclasses.replace(config, stop_signal=expand(instruction.signal))
        case DeclaredVolumes():
            paths = {expand(path) for path in instruction.paths}
            return dataclasses.replace(config, volumes=tuple(sorted({*config.volumes, *paths})))
        case Healthcheck():
            return dataclasses.replace(config, healthcheck=_healthcheck(instruction, config))
    return None


def command_line(command: Command, config: ImageConfig) -> tuple[str, ...]:
    return (*(config.shell or DEFAULT_SHELL), *command.words) if command.is_shell else command.words


def _healthcheck(instruction: Healthcheck, config: ImageConfig) -> dict[str, object]:
    if instruction.command is None:
        return {"Test": ["NONE"]}
    command = instruction.command
    found: dict[str, object] = {"Test": ["CMD-SHELL" if command.is_shell else "CMD", *command.words]}
    for name, key in _TIMES.items():
        text = instruction.options.get(name)
        if text is not None and (seconds := durations.seconds(text)) is not None:
            found[key] = round(seconds * 1e9)
    if (retries := instruction.options.get("retries")) is not None and retries.isdecimal():
        found["Retries"] = int(retries)
    return found


def _ports(text: str) -> list[str]:
    match = _PORTS.match(text)
    if match is not None:
        first, last, protocol = int(match[1]), int(match[2] or match[1]), (match[3] or "tcp").lower()
        if first <= last <= _MOST_PORTS and protocol in ("tcp", "udp", "sctp"):
            return [f"{port}/{protocol}" for port in range(first, last + 1)]
    raise BuildError(f"{text[:80]!r} is not a port", hint="Write EXPOSE 8000, 8000/udp or 8000-8010.")
