"""Options that several commands share, files in place of options, and the sandbox they describe."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from atoll.cli.network import read_policy
from atoll.errors import SpecError

if TYPE_CHECKING:
    from atoll.sandbox.sandbox import AsyncSandbox

EngineOption = Annotated[
    str, typer.Option("--engine", help="The engine that makes the sandbox; `atoll doctor` lists them.")
]
ImageOption = Annotated[str, typer.Option("--image", help="The root file system; `host` is this machine's own /usr.")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", "-m", help="The memory limit, for example 512m; `atoll doctor` shows the default."),
]
CpusOption = Annotated[
    float | None, typer.Option("--cpus", help="The CPU limit, for example 1.5; `atoll doctor` shows the default.")
]
PidsOption = Annotated[
    int | None, typer.Option("--pids", help="The limit of processes and threads; `atoll doctor` shows the default.")
]
EnvOption = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="An environment variable; may be repeated.")
]
VolumeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        "-v",
        metavar="HOST:PATH[:ro]",
        help="Mount a directory or file of this machine, read-only with `:ro`; may be repeated.",
    ),
]

DiskOption = Annotated[
    str | None, typer.Option("--disk", help="The disk limit, for example 2g; `atoll doctor` shows the default.")
]
SetupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--setup",
        metavar="COMMAND",
        help="A setup command to run first, for example 'pip install numpy'; may be repeated.",
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option("--task", metavar="ID", help="The task that the sandbox is for; it can be used in place of the id."),
]
NetworkOption = Annotated[
    str,
    typer.Option(
        "--network", help="What the sandbox may reach: none, all, domains separated by commas, or a policy in JSON."
    ),
]


_MAX_SPEC_BYTES = 1 << 20
FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="A JSON or TOML file that describes the sandbox.", metavar="FILE"),
]


def read_spec_file(path: Path) -> dict[str, Any]:
    """Read the description of a sandbox from JSON or TOML, with our names or those of the Manus example.

    Raises SpecError for a description that is found invalid without an engine.
    """
    import tomllib

    from atoll.model import SandboxSpec

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
    SandboxSpec.described(found)
    return dict(found)


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """The options of a new sandbox. Each field is an option of every command that creates one."""

    engine: EngineOption = "auto"
    image: ImageOption = "host"
    memory: MemoryOption = None
    cpus: CpusOption = None
    pids: PidsOption = None
    env: EnvOption = None
    volume: VolumeOption = None
    network: NetworkOption = "none"


@dataclass(frozen=True, slots=True)
class FullSandboxOptions(SandboxOptions):
    disk: DiskOption = None
    setup: SetupOption = None


def with_sandbox_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the parameter `wanted` of a command into options: one for each field of its class."""
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["wanted"].annotation
    hints = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
    ]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        wanted = kind(**{option.name: given.pop(option.name) for option in options})
        command(wanted=wanted, **given)

    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        shown += options if name == "wanted" else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return call


def make_sandbox(
    wanted: SandboxOptions,
    *,
    task: str | None = None,
    file: Path | None = None,
    ports: Mapping[str, int] | None = None,
) -> AsyncSandbox:
    from atoll.sandbox.sandbox import AsyncSandbox

    full = wanted if isinstance(wanted, FullSandboxOptions) else FullSandboxOptions()
    return AsyncSandbox(
        None if file is None else read_spec_file(file),
        engine=wanted.engine,
        image=wanted.image if file is None or wanted.image != "host" else None,
        memory=wanted.memory,
        cpus=wanted.cpus,
        pids=wanted.pids,
        disk=full.disk,
        setup=full.setup or None,
        task_id=task,
        network=None if wanted.network == "none" else read_policy(wanted.network),
        env=dict(_variable(text) for text in wanted.env or ()) or None,
        volumes=[_absolute(text) for text in wanted.volume or ()] or None,
        ports=ports,
    )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SpecError(f"'{text}' is not a variable", hint="Write -e NAME=VALUE.")
    return name, value


def _absolute(text: str) -> str:
    """Make the host path of a volume absolute: on a command line it may be relative."""
    host, colon, rest = text.partition(":")
    return f"{Path(host).absolute()}{colon}{rest}" if colon and host else text
