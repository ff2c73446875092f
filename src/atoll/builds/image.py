"""Images as users hold them: built from a Dockerfile, pulled, imported or listed, here or on a server."""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from atoll import workers
from atoll.builds.image_keepers import ImageKeeper, LocalKeeper, empty_context
from atoll.builds.request import BuildEvent, BuildRequest, OnBuildEvent
from atoll.engines.contract import Engine
from atoll.errors import SpecError
from atoll.images import Image, ImageConfig
from atoll.model.network_policy import NetworkRules
from atoll.sandbox.options import spec_of
from atoll.sandbox.sandbox_access import EngineChoice
from atoll.settings import Settings
from atoll.tracing import traced

DEFAULT_BUILD_S = 3600.0
_MAX_SECRET = 1 << 20


class AsyncImage:
    """The root file system that sandboxes start from. It can be passed as their `image`.

    Get one with `build`, `pull`, `import_tar`, `get` or `list`. `engine`, `server` and `api_key` say where images are,
    as for a sandbox: with a server, they are those of the server.
    """

    def __init__(self, found: Image, choice: EngineChoice) -> None:
        """Objects are made by the methods of the class."""
        self._found = found
        self._choice = choice

    @property
    def reference(self) -> str:
        """The image's name."""
        return self._found.reference

    @property
    def digest(self) -> str:
        """The digest of the image's files."""
        return self._found.digest

    @property
    def size_bytes(self) -> int:
        """The size of the image's files."""
        return self._found.size_bytes

    @property
    def created_at(self) -> float:
        """When the image was stored, in seconds since 1970."""
        return self._found.created_at

    @property
    def config(self) -> ImageConfig:
        """What the image says about sandboxes that are made from it: variables, user, work directory, labels and so
        on."""
        return self._found.config

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out when the image was unpacked, such as device nodes."""
        return self._found.notes

    @classmethod
    @traced("image.build")
    async def build(
        cls,
        context: str | Path | None = ".",
        *,
        dockerfile: str | bytes | None = None,
        name: str | None = None,
        args: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | bytes | Path] | None = None,
        labels: Mapping[str, str] | None = None,
        target: str | None = None,
        no_cache: bool = False,
        network: str | Mapping[str, object] | NetworkRules | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: str | int | None = None,
        timeout: float = DEFAULT_BUILD_S,
        on_event: OnBuildEvent | None = None,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Build an image from a Dockerfile. Raises BuildError if a step fails, and DockerfileError for a Dockerfile
        that cannot be carried out.

        `context` is a directory of this machine, whose files the Dockerfile may copy; None: nothing can be copied.
        `dockerfile` is a path in it, or the text itself as bytes. `secrets` are contents for
        `RUN --mount=type=secret`, or paths of files with them. `network` and the limits apply to each sandbox that a
        step runs in. `on_event` is called with what happens, such as each step and what it writes.
        """
        options = {"network": network, "memory": memory, "cpus": cpus, "pids": pids, "disk": disk}
        spec = spec_of(options)
        if not timeout > 0:
            raise SpecError(f"a timeout must be more than 0 seconds, not {timeout!r}")
        given = await workers.run(workers.TRANSFER, _contents, secrets or {})
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        async with _keeper(choice) as keeper, _directory(context) as directory:
            request = BuildRequest(
                context=directory,
                dockerfile=dockerfile,
                name=name or "",
                args=dict(args or {}),
                secrets=given,
                labels=dict(labels or {}),
                target=target or "",
                no_cache=no_cache,
                network=spec.network,
                limits=spec.limits,
                timeout_s=timeout,
            )
            built = await keeper.build(request, on_event or _nothing)
        return cls(built.image, choice)

    @classmethod
    async def list(
        cls,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[Self]:
        """Return all images of this machine, or those of a server that the caller may see, by name."""
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        async with _keeper(choice) as keeper:
            return [cls(each, choice) for each in await keeper.list()]

    @classmethod
    async def get(
        cls,
        reference: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Return an image that is there, without pulling or building it. Raises ImageNotFoundError."""
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        async with _keeper(choice) as keeper:
            return cls(await keeper.get(reference), choice)

    @classmethod
    async def pull(
        cls,
        reference: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Fetch an image from its registry as it is now. Parts that are here already are not transferred again."""
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        async with _keeper(choice) as keeper:
            return cls(await keeper.pull(reference), choice)

    @classmethod
    async def import_tar(
        cls,
        path: str | Path,
        name: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Make an image from an archive of this machine: a root file system, or an image that another program
        saved."""
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        async with _keeper(choice) as keeper:
            return cls(await keeper.load(Path(path), name), choice)

    @classmethod
    async def load(
        cls,
        path: str | Path,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Read an image from a file that `save` or another program, such as Docker, wrote. It has its name in there."""
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        async with _keeper(choice) as keeper:
            return cls(await keeper.load(Path(path), ""), choice)

    @classmethod
    async def prune(
        cls,
        *,
        unused_for: float = 0.0,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> int:
        """Remove images that no sandbox and no saved state uses, and return how many bytes were freed. With
        `unused_for`, only those that have not been used for so many seconds."""
        choice = EngineChoice(engine, server, api_key, settings or Settings.load())
        async with _keeper(choice) as keeper:
            return await keeper.prune(unused_for)

    async def push(self, target: str | None = None) -> str:
        """Send the image to a registry, under its own name or another. Returns the name there with a digest."""
        async with _keeper(self._choice) as keeper:
            return await keeper.push(self.reference, target or "")

    async def save(self, path: str | Path) -> None:
        """Write the image to a file of this machine that `load` and other programs, such as Docker, read."""
        async with _keeper(self._choice) as keeper:
            await keeper.save(self.reference, Path(path))

    async def inspect(self) -> AsyncImage:
        """Return the image that has this name now. Raises ImageNotFoundError if it was removed."""
        async with _keeper(self._choice) as keeper:
            return type(self)(await keeper.get(self.reference), self._choice)

    async def remove(self) -> None:
        """Remove the image. Raises ImageError while sandboxes use it."""
        async with _keeper(self._choice) as keeper:
            await keeper.remove(self.reference)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.reference} {self.digest[:19]}>"


@asynccontextmanager
async def _keeper(choice: EngineChoice) -> AsyncIterator[ImageKeeper]:
    engine = await choice.engine(None)
    try:
        if choice.name == "remote":
            from atoll.builds.remote_keeper import RemoteKeeper  # needs more packages
            from atoll.engines.remote.engine import RemoteEngine

            assert isinstance(engine, RemoteEngine)
            yield RemoteKeeper(engine.server)
        else:
            yield LocalKeeper(engine, choice.settings)
    finally:
        choice.release()


@asynccontextmanager
async def _directory(context: str | Path | None) -> AsyncIterator[Path]:
    if context is None:
        async with empty_context() as empty:
            yield empty
        return
    if not os.path.isdir(context):
        raise SpecError(f"the context '{context}' is not a directory", hint="Name the directory to copy files from.")
    yield Path(context).absolute()


def _contents(secrets: Mapping[str, str | bytes | Path]) -> dict[str, bytes]:
    found = {}
    for name, value in secrets.items():
        try:
            data = value.read_bytes() if isinstance(value, Path) else value
        except OSError as error:
            raise SpecError(f"the secret '{name}' cannot be read: {error.strerror or error}") from error
        found[name] = data.encode() if isinstance(data, str) else data
        if len(found[name]) > _MAX_SECRET:
            raise SpecError(f"the secret '{name}' has more than {_MAX_SECRET:,} bytes")
    return found


def _nothing(_: BuildEvent) -> None:
    pass
