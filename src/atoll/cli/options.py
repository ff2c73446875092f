"""Options that several commands share, and the sandbox they describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import spec_file
from atoll.cli.network import read_policy
from atoll.errors import SpecError
from atoll.sandbox import AsyncSandbox

EngineOption = Annotated[str, typer.Option("--engine", help="Which engine makes the sandbox; see `atoll doctor`.")]
ImageOption = Annotated[str, typer.Option("--image", help="The root file system; `host` is this machine's own /usr.")]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", "-m", help="Most memory, for example 512m; default: see `atoll doctor`.")
]
CpusOption = Annotated[
    float | None, typer.Option("--cpus", help="Most CPUs, for example 1.5; default: see `atoll doctor`.")
]
PidsOption = Annotated[
    int | None, typer.Option("--pids", help="Most processes and threads; default: see `atoll doctor`.")
]
EnvOption = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="A variable; may be repeated.")]
VolumeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        "-v",
        metavar="HOST:PATH[:ro]",
        help="Share a directory or file, read-only with `:ro`; may be repeated.",
    ),
]

DiskOption = Annotated[
    str | None, typer.Option("--disk", help="Most disk, for example 2g; default: see `atoll doctor`.")
]
SetupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--setup",
        metavar="COMMAND",
        help="Run this in it before anything else, for example 'pip install numpy'; may be repeated.",
    ),
]
TaskOption = Annotated[
    str | None, typer.Option("--task", metavar="ID", help="The task that it is for, which can stand for its id.")
]
NetworkOption = Annotated[
    str,
    typer.Option("--network", help="What it may reach: none, all, domains with commas between, or a policy in JSON."),
]


def make_sandbox(
    engine: str,
    image: str,
    memory: str | None,
    cpus: float | None,
    pids: int | None,
    env: Sequence[str] | None,
    volume: Sequence[str] | None,
    network: str = "none",
    *,
    disk: str | None = None,
    setup: Sequence[str] | None = None,
    task: str | None = None,
    file: Path | None = None,
    ports: Mapping[str, int] | None = None,
) -> AsyncSandbox:
    return AsyncSandbox(
        None if file is None else spec_file.read(file),
        engine=engine,
        image=image if file is None or image != "host" else None,
        memory=memory,
        cpus=cpus,
        pids=pids,
        disk=disk,
        setup=setup or None,
        task_id=task,
        network=None if network == "none" else read_policy(network),
        env=dict(_variable(text) for text in env or ()) or None,
        volumes=[_absolute(text) for text in volume or ()] or None,
        ports=ports,
    )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SpecError(f"'{text}' is not a variable", hint="Write -e NAME=VALUE.")
    return name, value


def _absolute(text: str) -> str:
    """On a command line a host path may be relative."""
    host, colon, rest = text.partition(":")
    return f"{Path(host).absolute()}{colon}{rest}" if colon and host else text
