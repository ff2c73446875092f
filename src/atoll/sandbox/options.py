"""The options that describe a sandbox: the same for `Sandbox` and for `create_sandbox` of a manager, in requests to a
server, and as flags of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from atoll.errors import SpecError
from atoll.model import NAME_LABEL, OWN_LABELS, SandboxSpec, UndoRule, Volume
from atoll.model.checkpoint import Undo
from atoll.model.manus_names import SandboxNames
from atoll.model.network_policy import NetworkRules

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@runtime_checkable
class NamedImage(Protocol):
    """An image as an object, such as `Image.build` returns."""

    @property
    def reference(self) -> str:
        """Its name."""


class SpecOptions(SandboxNames, total=False):
    """The description of a sandbox. None stands for the default. All times are in seconds."""

    image: str | NamedImage | None
    """The root file system, or its name. The default is `host`, this machine's own programs."""
    isolation: str | None
    """`namespaces` or `gvisor`; the default is what the engine has."""
    memory: str | int | None
    """The limit of memory, in bytes or as text such as `512m`."""
    cpus: float | None
    pids: int | None
    """The limit of processes and threads."""
    disk: str | int | None
    """The limit of disk space, in bytes or as text such as `2g`."""
    inodes: int | None
    """The limit of files and directories."""
    open_files: int | None
    """The limit of open files of each process."""
    shm: str | int | None
    """The size of `/dev/shm`, in bytes or as text such as `1g`. What is in it counts as memory."""
    env: Mapping[str, str] | None
    """Environment variables of all commands."""
    volumes: Mapping[str, str] | Sequence[str] | None
    """Named volumes and directories of the host: `{"data": "/data"}`, `{"/host": "/inside:ro"}` or
    `["data:/data", "/host:/inside:ro"]`. A source with a slash is a directory of the host."""
    work_dir: str | None
    """The directory where commands and relative paths start. The default is that of the image, or `/workspace`."""
    user: str | None
    """The user inside that commands run as if they name none. The default is that of the image, or root."""
    hostname: str | None
    network: str | Mapping[str, object] | NetworkRules | None
    """What the sandbox may reach: `none` (the default), `all` or rules."""
    lifetime: float | None
    """How long the sandbox may exist."""
    setup: Sequence[str] | None
    """Command lines that run before anybody gets the sandbox."""
    setup_timeout: float | None
    """How long all setup commands may take together."""
    start: Sequence[object] | None
    """Commands that run from the creation on, and again when they end: command lines, lists of arguments, or objects as
    of `StartCommand`."""
    ready: object
    """What has to hold before anybody gets the sandbox: a port, a port and a path such as `"8080/health"`, a command,
    or an object as of `ReadyCheck`."""
    sudo: bool | None
    """Whether the account `user` inside may become root by `sudo`."""
    prewarm: str | None
    """`memory` keeps the memory of the first sandbox of this spec that is ready, on gVisor, so that the next ones start
    with everything running."""
    undo: bool | Undo | UndoRule | None
    """Whether, how often and before which commands to save the state, so that commands can be undone."""
    task_id: str | None
    """The task that the sandbox is for. The sandbox can be found by it as by a name."""
    labels: Mapping[str, str] | None
    ports: Mapping[str, int] | None
    """Ports by name. Each sets a variable inside, `NAME=PORT`, and a server exposes it."""


def spec_of(options: object) -> SandboxSpec:
    """Return the spec that these options describe, which may also have the names of a spec or of the Manus example.

    None stands for an option that is not given. Raises SpecError, which suggests the right name for one that does not
    exist.
    """
    if not isinstance(options, Mapping):
        return SandboxSpec.described(options)
    given: dict[Any, Any] = {name: value for name, value in options.items() if value is not None}
    ports, name, undo = given.pop("ports", None), given.pop("name", None), given.pop("undo", None)
    if isinstance(given.get("image"), NamedImage):
        given["image"] = given["image"].reference
    if str(given.get("image", "")).startswith("step:"):
        raise SpecError("a step of a build cannot be used as an image", hint="Give the built image its name.")
    if ports is not None:
        given["env"] = {**_variables(ports), **_mapping("env", given.get("env", {}))}
    if isinstance(given.get("network"), Mapping):
        given["network"] = dict(given["network"])
    if undo is not None:
        given["undo"] = _rule(undo)
    if "labels" in given or name is not None:
        given["labels"] = {
            **own_labels(_mapping("labels", given.get("labels", {}))),
            **({NAME_LABEL: checked_name(name)} if name is not None else {}),
        }
    return SandboxSpec.described(given)


def _mapping(option: str, value: object) -> Mapping[str, Any]:
    """Return the value of an option that consists of names and values. Raises SpecError if it does not."""
    if not isinstance(value, Mapping):
        raise SpecError(f"'{option}' must be an object with names and values, not {str(value)[:80]!r}")
    return value


def _variables(ports: object) -> dict[str, str]:
    """Return the variables that say inside which port is which. Raises SpecError."""
    found = _mapping("ports", ports)
    for name, port in found.items():
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise SpecError(f"the port {str(name)[:80]!r} must be a number from 1 to 65535, not {str(port)[:80]!r}")
    return {name: str(port) for name, port in found.items()}


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels. Raises SpecError if one is reserved."""
    for label in labels:
        if isinstance(label, str) and label.startswith(OWN_LABELS):
            raise SpecError(f"labels that begin with '{OWN_LABELS}' are reserved for Atoll: {label[:80]!r}")
    return dict(labels)


def checked_name(name: object) -> str:
    """Return the name of a sandbox. Raises SpecError if it is none."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(
            f"{str(name)[:80]!r} is not a valid name",
            hint="Use up to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit.",
        )
    return name


def volumes_of(volumes: Mapping[str, str] | Sequence[str | Volume]) -> tuple[Volume, ...]:
    """Parse volumes. Raises SpecError."""
    texts = [f"{host}:{path}" for host, path in volumes.items()] if isinstance(volumes, Mapping) else volumes
    return tuple(each if isinstance(each, Volume) else Volume.parse(each) for each in texts)


def _rule(undo: object) -> object:
    """Return what a spec can hold of an undo option. Raises SpecError for a function, which cannot be written down."""
    if isinstance(undo, Undo):
        if undo.risky is not None:
            raise SpecError(
                "'undo' with a function cannot be kept with the sandbox",
                hint="Name the commands by patterns: undo=UndoRule(only=('*rm *',)).",
            )
        return UndoRule(keep=undo.keep)
    return undo
