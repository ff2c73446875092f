"""The flags that describe a new sandbox, the same for every command that makes one, and a file in place of flags."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from atoll.cli.network import read_policy
from atoll.cli.ports import named_ports
from atoll.errors import SpecError

if TYPE_CHECKING:
    from atoll.sandbox.sandbox import AsyncSandbox

_MAX_SPEC_BYTES = 1 << 20
_DEFAULT = "`atoll doctor` shows the default."

EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="The engine that makes the sandbox; default: the first of native, oci and bubblewrap that works here.",
    ),
]
EnvOption = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="An environment variable; may be repeated.")
]
SetupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--setup",
        metavar="COMMAND",
        help="A setup command to run first, for example 'pip install numpy'; may be repeated.",
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="A JSON or TOML file that describes the sandbox. Flags replace what it says.",
        metavar="FILE",
    ),
]


@dataclass(frozen=True, slots=True)
class SandboxFlags:
    """The flags of a new sandbox. Each field but the first two has the name of the option of `Sandbox` that it sets."""

    file: FileOption = None
    engine: EngineOption = None
    image: Annotated[
        str | None,
        typer.Option("--image", help="The root file system; the default, `host`, is this machine's own /usr."),
    ] = None
    isolation: Annotated[
        str | None, typer.Option("--isolation", help="namespaces or gvisor; the default is what the engine has.")
    ] = None
    memory: Annotated[
        str | None, typer.Option("--memory", "-m", help=f"The memory limit, for example 512m; {_DEFAULT}")
    ] = None
    cpus: Annotated[float | None, typer.Option("--cpus", help=f"The CPU limit, for example 1.5; {_DEFAULT}")] = None
    pids: Annotated[int | None, typer.Option("--pids", help=f"The limit of processes and threads; {_DEFAULT}")] = None
    disk: Annotated[str | None, typer.Option("--disk", help=f"The disk limit, for example 2g; {_DEFAULT}")] = None
    inodes: Annotated[int | None, typer.Option("--inodes", help="The limit of files and directories.")] = None
    open_files: Annotated[
        int | None, typer.Option("--open-files", help=f"The limit of open files of each process; {_DEFAULT}")
    ] = None
    shm: Annotated[str | None, typer.Option("--shm", help="The size of /dev/shm, for example 1g; default: 64m.")] = None
    env: EnvOption = None
    volumes: Annotated[
        list[str] | None,
        typer.Option(
            "--volume",
            "-v",
            metavar="SOURCE:PATH[:ro]",
            help="Mount a named volume, or a directory or file of this machine if SOURCE has a slash, read-only with"
            " `:ro`; may be repeated.",
        ),
    ] = None
    work_dir: Annotated[
        str | None,
        typer.Option("--work-dir", help="The directory where commands start; default: the image's, or /workspace."),
    ] = None
    user: Annotated[
        str | None, typer.Option("--user", "-u", help="The user that commands run as; default: the image's, or root.")
    ] = None
    hostname: Annotated[str | None, typer.Option("--hostname", help="The host name inside.")] = None
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            help="What the sandbox may reach: none (default), all, domains separated by commas, or a policy in JSON.",
        ),
    ] = None
    lifetime: Annotated[
        float | None, typer.Option("--lifetime", metavar="SECONDS", help="How long the sandbox may exist.")
    ] = None
    setup: SetupOption = None
    setup_timeout: Annotated[
        float | None,
        typer.Option("--setup-timeout", metavar="SECONDS", help="How long all setup commands may take together."),
    ] = None
    start: Annotated[
        list[str] | None,
        typer.Option(
            "--start",
            metavar="COMMAND",
            help="A command that runs from the creation on, and again when it ends; also as JSON; may be repeated.",
        ),
    ] = None
    ready: Annotated[
        str | None,
        typer.Option(
            "--ready",
            metavar="CHECK",
            help="Wait until this holds: a port, a port and a path such as 8080/health, a command; also as JSON.",
        ),
    ] = None
    sudo: Annotated[
        bool | None, typer.Option("--sudo/--no-sudo", help="Let the account `user` inside become root by sudo.")
    ] = None
    prewarm: Annotated[
        str | None,
        typer.Option("--prewarm", metavar="memory", help="Keep the memory of a ready sandbox for the next ones."),
    ] = None
    undo: Annotated[
        bool, typer.Option("--undo", help="Save the state before each command, so that `atoll undo` can go back.")
    ] = False
    name: Annotated[str | None, typer.Option("--name", help="A unique name, which can be used in place of the id.")] = (
        None
    )
    task_id: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="ID", help="The task that the sandbox is for; it can be used in place of the id."
        ),
    ] = None
    labels: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="K=V", help="A label; may be repeated.")
    ] = None
    ports: Annotated[
        list[str] | None,
        typer.Option("--port", metavar="NAME=PORT", help="Expose a port on the server under a name; may be repeated."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the options of `Sandbox` that were given as flags. Raises SpecError."""
        plain = {name: value for name in _PLAIN if (value := getattr(self, name)) not in (None, False)}
        plain |= {} if self.sudo is None else {"sudo": self.sudo}
        lists: dict[str, Any] = {
            "env": dict(pair(text, "a variable") for text in self.env or ()),
            "labels": dict(pair(text, "a label") for text in self.labels or ()),
            "volumes": [_absolute(text) for text in self.volumes or ()],
            "setup": self.setup,
            "start": [_json_or_text(text) for text in self.start or ()],
            "ready": None if self.ready is None else _json_or_text(self.ready),
            "network": None if self.network is None else read_policy(self.network),
            "ports": named_ports(self.ports),
        }
        return plain | {name: value for name, value in lists.items() if value}


_PLAIN = (
    *("image", "isolation", "memory", "cpus", "pids", "disk", "inodes", "open_files", "shm", "work_dir", "hostname"),
    *("user", "lifetime", "setup_timeout", "prewarm", "undo", "name", "task_id"),
)
"""The flags whose values are those of the options."""


def _json_or_text(text: str) -> object:
    """Return the object that a flag describes in JSON, or its text. Raises SpecError."""
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(f"{text[:80]!r} is not JSON: {error}") from None


def flag_of(option: str) -> str:
    """Return the flag that sets an option."""
    flag = get_type_hints(SandboxFlags, include_extras=True)[option].__metadata__[0]
    names: tuple[str, ...] = (flag.default, *flag.param_decls)
    return next(name for name in names if name.startswith("--"))


def read_spec_file(path: Path) -> dict[str, Any]:
    """Read the description of a sandbox from JSON or TOML, with our names or those of the Manus example.

    Raises SpecError for a description that is found invalid without an engine.
    """
    import tomllib

    from atoll.sandbox.options import spec_of

    try:
        with path.open("rb") as file:
            text = file.read(_MAX_SPEC_BYTES + 1)
        if len(text) > _MAX_SPEC_BYTES:
            raise SpecError(f"'{path}' is larger than {_MAX_SPEC_BYTES:,} bytes")
        found = tomllib.loads(text.decode()) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise SpecError(
            f"'{path}' is not {kind}: {error}", hint="Name it *.json or *.toml, according to its content."
        ) from None
    spec_of(found)
    return dict(found)


def with_sandbox_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the parameter `wanted` of a command into flags: one for each field of `SandboxFlags`."""
    signature = inspect.signature(command, eval_str=True)
    hints = get_type_hints(SandboxFlags, include_extras=True)
    flags = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(SandboxFlags)
    ]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        wanted = SandboxFlags(**{flag.name: given.pop(flag.name) for flag in flags})
        command(wanted=wanted, **given)

    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        shown += flags if name == "wanted" else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return call


def make_sandbox(wanted: SandboxFlags, described: Mapping[str, Any] | None = None) -> AsyncSandbox:
    """Return the sandbox that the flags and options describe, which does not exist yet. Flags come first. Raises
    SpecError."""
    from atoll.sandbox.sandbox import AsyncSandbox

    given, engine = wanted.given(), wanted.engine or "auto"
    described = dict(described or {})
    if wanted.file is not None:
        described |= read_spec_file(wanted.file)
    if not described:
        return AsyncSandbox(engine=engine, **given)
    ports = given.pop("ports", None)
    return AsyncSandbox({**described, **given} if given else described, engine=engine, ports=ports)


def refuse_together(one: str, wanted: SandboxFlags, allowed: Sequence[str] = ()) -> None:
    """Raise SpecError if there are flags that make no sense together with `one`."""
    given = [option for option in fields(SandboxFlags) if getattr(wanted, option.name) not in (None, False)]
    if others := [flag_of(option.name) for option in given if option.name not in allowed]:
        raise SpecError(f"{one} and {', '.join(others)} exclude each other", hint="Give only one of them.")


def pair(text: str, what: str) -> tuple[str, str]:
    """Parse K=V. Raises SpecError, which says what it should be."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SpecError(f"'{text}' is not {what}", hint="Write NAME=VALUE.")
    return name, value


def _absolute(text: str) -> str:
    """Make the host path of a volume absolute: on a command line it may be relative. A source without a slash is the
    name of a volume."""
    host, colon, rest = text.partition(":")
    is_path = "/" in host or host in (".", "..")
    return f"{Path(os.path.abspath(host))}{colon}{rest}" if colon and is_path else text
