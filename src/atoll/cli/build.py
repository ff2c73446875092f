"""`atoll build`: an image from a Dockerfile, each step in a sandbox."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from atoll.cli.build_progress import BuildProgress
from atoll.cli.network import read_policy
from atoll.cli.options import pair
from atoll.cli.run import stopped_by_signals
from atoll.cli.shell import interact
from atoll.cli.target import JsonOption, open_server, server_url, size
from atoll.errors import BuildError, SpecError
from atoll.printable import printable, printable_lines

if TYPE_CHECKING:
    from atoll.builds import BuildRequest, BuiltImage
    from atoll.engines.contract import Engine
    from atoll.settings import Settings

T = TypeVar("T")
_MAX_SECRET = 1 << 20
_MAX_DOCKERFILE = 4 << 20
_DEFAULT = "Dockerfile"


def build(
    directory: Annotated[Path, typer.Argument(help="The context: files that may be copied.", metavar="[DIR]")] = Path(),
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="The Dockerfile, or `-` for standard input; default: Dockerfile.")
    ] = None,
    name: Annotated[str, typer.Option("--name", "-t", help="The name of the image, such as mine or team/mine:1.")] = "",
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="K=V", help="The value of an ARG; may be repeated.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret", metavar="id=ID,src=FILE", help="A secret for RUN --mount, from a file or by env=VARIABLE."
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="A label of the image; may be repeated.")
    ] = None,
    target: Annotated[str, typer.Option("--target", help="The stage to build; default: the last.")] = "",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Carry out every step again.")] = False,
    network: Annotated[
        str,
        typer.Option("--network", help="What RUN may reach: none (default), all, domains, or a policy in JSON."),
    ] = "none",
    engine: Annotated[str, typer.Option("--engine", help="The engine whose sandboxes carry out the steps.")] = "auto",
    memory: Annotated[str | None, typer.Option("--memory", "-m", help="The memory of each step.")] = None,
    cpus: Annotated[float | None, typer.Option("--cpus", help="The CPUs of each step.")] = None,
    pids: Annotated[int | None, typer.Option("--pids", help="The processes and threads of each step.")] = None,
    disk: Annotated[str | None, typer.Option("--disk", help="The disk space of each stage.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long it may take.")] = 3600.0,
    shell_on_failure: Annotated[
        bool, typer.Option("--shell-on-failure", help="Open a shell in the sandbox of the step that failed.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Build an image from a Dockerfile. Each step runs in a sandbox, and what is known already is not done again."""
    from atoll.builds import BuildRequest
    from atoll.sandbox.options import spec_of

    _refuse_names(directory)
    if shell_on_failure and (server_url() is not None or not sys.stdin.isatty() or not sys.stdout.isatty()):
        raise SpecError("--shell-on-failure needs a terminal, and a build on this machine")
    if not timeout > 0:
        raise SpecError(f"a timeout must be more than 0 seconds, not {timeout!r}")
    wanted = spec_of({"network": read_policy(network), "memory": memory, "cpus": cpus, "pids": pids, "disk": disk})
    request = BuildRequest(
        context=directory.absolute(),
        dockerfile=_dockerfile(directory, file),
        name=name,
        args=dict(_argument(text) for text in build_arg or ()),
        secrets=dict(_secret(text) for text in secret or ()),
        labels=dict(pair(text, "a label") for text in label or ()),
        target=target,
        no_cache=no_cache,
        network=wanted.network,
        limits=wanted.limits,
        timeout_s=timeout,
        keep_failed=shell_on_failure,
    )
    with BuildProgress(as_json=json) as progress:
        code, built = _until_stopped(_build(request, engine, progress))
    if built is None:
        raise SystemExit(code)
    image = built.image
    if json:
        progress.print_json({"kind": "image", "reference": image.reference, "digest": image.digest})
        return
    print(f"{_short(image.reference)}  {image.digest}  {size(image.size_bytes)}")
    known = f", {built.cached} of them known" if built.cached else ""
    print(f"{built.steps} steps{known}, {built.seconds:.1f} s", file=sys.stderr)


async def _build(request: BuildRequest, engine_name: str, progress: BuildProgress) -> BuiltImage | None:
    if server_url() is not None:
        if engine_name not in ("auto", "remote"):
            raise SpecError(f"give either a server or the engine {engine_name!r}, not both")
        return await _build_there(request, progress)
    from atoll.engines import leases
    from atoll.settings import Settings

    settings = Settings.load()
    lease = await leases.acquire(engine_name, settings)
    try:
        return await _build_here(request, lease.engine, settings, progress)
    finally:
        leases.release(lease)


async def _build_there(request: BuildRequest, progress: BuildProgress) -> BuiltImage:
    """Build on the server. A signal that ends this command cancels the build there as well."""
    from atoll.builds.remote_build import build_on_server

    async with open_server() as engine:
        try:
            return await build_on_server(engine.server, request, progress.add)
        except BuildError as error:
            progress.show_end_of(error)
            raise


async def _build_here(
    request: BuildRequest, engine: Engine, settings: Settings, progress: BuildProgress
) -> BuiltImage | None:
    from atoll.builds import Builder
    from atoll.images import Images

    try:
        return await Builder(engine, Images(settings.data_dir), settings).build(request, progress.add)
    except BuildError as error:
        progress.show_end_of(error)
        if not error.sandbox_id:
            raise
        progress.stop()
        await _shell(error, engine)
        return None


async def _shell(error: BuildError, engine: Engine) -> None:
    """Open a shell in the sandbox of the failed step, and delete the sandbox at its end."""
    from atoll.sandbox.sandbox import AsyncSandbox

    sandbox = await AsyncSandbox.attach(error.sandbox_id, engine=engine)
    try:
        print(printable_lines(f"atoll: {error}"), file=sys.stderr)
        print("This shell is in the state where it failed; Ctrl-D or `exit` ends it.", file=sys.stderr)
        await interact(sandbox)
    finally:
        await sandbox.cleanup()


def _until_stopped(work: Coroutine[Any, Any, T]) -> tuple[int, T | None]:
    """Return the result of the work, or an exit code if a signal ended it. A build that failed ends with 125."""

    async def run() -> tuple[int, T | None]:
        task = asyncio.current_task()
        assert task is not None
        received: list[int] = []
        with stopped_by_signals(task, received):
            try:
                return 125, await work
            except asyncio.CancelledError:
                if not received:
                    raise
                return 128 + received[0], None

    return asyncio.run(run())


def _refuse_names(directory: Path) -> None:
    """Raise SpecError with the right command for what is no directory."""
    if directory.is_dir():
        return
    from atoll.images import Images
    from atoll.images.reference import ENVIRONMENTS
    from atoll.settings import Settings

    text = str(directory)
    names = {*ENVIRONMENTS, *Images(Settings.load().data_dir).recipes.all()}
    if text in names or text.startswith(("debian:", "recipe:")):
        raise SpecError(
            f"{text!r} is no directory, but an image that is built by name", hint=f"Run: atoll image build {text}"
        )
    if directory.is_file():
        raise SpecError(f"{text!r} is a file", hint=f"Run: atoll build -f {text} {directory.parent}")
    raise SpecError(f"there is no directory {text!r}", hint="Name the directory of the context; default: this one.")


def _dockerfile(directory: Path, file: str | None) -> str | bytes | None:
    """Return the path of the Dockerfile in the context or, if it is somewhere else, its text."""
    if file is None:
        return None
    if file == "-":
        text = sys.stdin.buffer.read(_MAX_DOCKERFILE + 1)
        return _bounded(text, _MAX_DOCKERFILE, "the Dockerfile")
    path = Path(file)
    if not path.exists() and (directory / file).exists():
        path = directory / file
    try:
        return str(path.absolute().relative_to(directory.absolute()))
    except ValueError:
        return _read(path, _MAX_DOCKERFILE)


def _argument(text: str) -> tuple[str, str]:
    """Return a build argument. Without a value it is taken from the environment, as with Docker."""
    if "=" not in text and text in os.environ:
        return text, os.environ[text]
    return pair(text, "a build argument")


def _secret(text: str) -> tuple[str, bytes]:
    """Return the id and the content of a secret. Its content is never shown, also not in an error."""
    fields = dict(pair(each, "a secret") for each in text.split(","))
    name = fields.get("id", "")
    source, variable = fields.get("src", fields.get("source", "")), fields.get("env", "")
    if unknown := fields.keys() - {"id", "src", "source", "env", "type"}:
        raise SpecError(f"a secret has no option {min(unknown)[:80]!r}", hint=_SECRET_HINT)
    if not name or (source and variable):
        raise SpecError("a secret has an id, and comes from a file or a variable", hint=_SECRET_HINT)
    if source:
        return name, _read(Path(source), _MAX_SECRET)
    value = os.environ.get(variable or name)
    if value is None:
        raise SpecError(f"there is no variable {variable or name!r} for the secret", hint=_SECRET_HINT)
    return name, value.encode(errors="surrogateescape")


_SECRET_HINT = "Write --secret id=NAME,src=FILE or --secret id=NAME,env=VARIABLE."  # noqa: S105


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return _bounded(file.read(limit + 1), limit, f"'{path}'")
    except OSError as error:
        raise SpecError(f"'{path}' cannot be read: {error.strerror}") from error


def _bounded(text: bytes, limit: int, what: str) -> bytes:
    if len(text) > limit:
        raise SpecError(f"{what} has more than {limit:,} bytes")
    return text


def _short(reference: str) -> str:
    """Return the name of an image as it may be written: without what stands for the default."""
    return printable(reference).removeprefix("docker.io/").removeprefix("library/").removesuffix(":latest")
