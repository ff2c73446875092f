"""The synchronous classes. Generated from the asynchronous ones by scripts/generate_sync.py."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from atoll.builds.image import DEFAULT_BUILD_S, AsyncImage
from atoll.builds.request import OnBuildEvent
from atoll.engines.contract import Engine
from atoll.images import ImageConfig
from atoll.model.network_policy import NetworkRules
from atoll.sandbox.portal import Portal, portal
from atoll.settings import Settings


class Image:
    """The root file system that sandboxes start from. It can be passed as their `image`.

    Get one with `build`, `pull`, `import_tar`, `get` or `list`. `engine`, `server` and `api_key` say where images are,
    as for a sandbox: with a server, they are those of the server.
    """

    def __init__(self, original: AsyncImage, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    @property
    def reference(self) -> str:
        """The image's name."""
        return self._async.reference

    @property
    def digest(self) -> str:
        """The digest of the image's files."""
        return self._async.digest

    @property
    def size_bytes(self) -> int:
        """The size of the image's files."""
        return self._async.size_bytes

    @property
    def created_at(self) -> float:
        """When the image was stored, in seconds since 1970."""
        return self._async.created_at

    @property
    def config(self) -> ImageConfig:
        """What the image says about sandboxes that are made from it: variables, user, work directory, labels and so
        on."""
        return self._async.config

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out when the image was unpacked, such as device nodes."""
        return self._async.notes

    @classmethod
    def build(
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
        made = cls.__new__(cls)
        made._async = portal().call(
            AsyncImage.build(
                context,
                dockerfile=dockerfile,
                name=name,
                args=args,
                secrets=secrets,
                labels=labels,
                target=target,
                no_cache=no_cache,
                network=network,
                memory=memory,
                cpus=cpus,
                pids=pids,
                disk=disk,
                timeout=timeout,
                on_event=on_event,
                engine=engine,
                server=server,
                api_key=api_key,
                settings=settings,
            )
        )
        made._portal = portal()
        return made

    @classmethod
    def list(
        cls,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[Self]:
        """Return all images of this machine, or those of a server that the caller may see, by name."""
        return [
            cls(each, portal())
            for each in portal().call(AsyncImage.list(engine=engine, server=server, api_key=api_key, settings=settings))
        ]

    @classmethod
    def get(
        cls,
        reference: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Return an image that is there, without pulling or building it. Raises ImageNotFoundError."""
        made = cls.__new__(cls)
        made._async = portal().call(
            AsyncImage.get(reference, engine=engine, server=server, api_key=api_key, settings=settings)
        )
        made._portal = portal()
        return made

    @classmethod
    def pull(
        cls,
        reference: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Fetch an image from its registry as it is now. Parts that are here already are not transferred again."""
        made = cls.__new__(cls)
        made._async = portal().call(
            AsyncImage.pull(reference, engine=engine, server=server, api_key=api_key, settings=settings)
        )
        made._portal = portal()
        return made

    @classmethod
    def import_tar(
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
        made = cls.__new__(cls)
        made._async = portal().call(
            AsyncImage.import_tar(path, name, engine=engine, server=server, api_key=api_key, settings=settings)
        )
        made._portal = portal()
        return made

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Read an image from a file that `save` or another program, such as Docker, wrote. It has its name in there."""
        made = cls.__new__(cls)
        made._async = portal().call(
            AsyncImage.load(path, engine=engine, server=server, api_key=api_key, settings=settings)
        )
        made._portal = portal()
        return made

    @classmethod
    def prune(
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
        return portal().call(
            AsyncImage.prune(unused_for=unused_for, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    def push(self, target: str | None = None) -> str:
        """Send the image to a registry, under its own name or another. Returns the name there with a digest."""
        return self._portal.call(self._async.push(target))

    def save(self, path: str | Path) -> None:
        """Write the image to a file of this machine that `load` and other programs, such as Docker, read."""
        self._portal.call(self._async.save(path))

    def inspect(self) -> Image:
        """Return the image that has this name now. Raises ImageNotFoundError if it was removed."""
        return Image(self._portal.call(self._async.inspect()), self._portal)

    def remove(self) -> None:
        """Remove the image. Raises ImageError while sandboxes use it."""
        self._portal.call(self._async.remove())
