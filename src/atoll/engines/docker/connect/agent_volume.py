"""The agent inside containers, from a read-only volume that all sandboxes of a Docker engine share.

Copying the agent into each container would take a quarter of the time of a start, and code inside could then change it.
So it is copied once, into a volume named after its digest, which every sandbox mounts. This needs no directory of the
host and works with Docker engines on other machines.

A volume cannot be filled atomically. It is filled through a container with a fixed name that is never started and that
is removed at the end. So the volume is complete when it exists and the container does not. A container that stays was
left by a process that died; after a while it is removed and the work is repeated.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import tarfile
from contextlib import suppress
from dataclasses import dataclass

from atoll import agent_binary
from atoll.cancellation import finish
from atoll.engines.docker.api.http import SLOW_S, Http, RefusedError
from atoll.errors import EngineError

HOME = "/.atoll"
PROGRAM = f"{HOME}/agent"
RUN = f"{HOME}/run"
SOCKET = f"{RUN}/socket"
LABEL = "atoll.agent"
_WAIT_S = 20.0
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Agent:
    digest: str
    tar: bytes
    """An archive with the program, and with the empty directory where the small file system for the socket is
    mounted."""

    @property
    def volume(self) -> str:
        return f"atoll-agent-{self.digest[:16]}"


def packed() -> Agent:
    """Return the agent of this installation. Raises EngineUnavailableError if it was not built."""
    path = agent_binary.path()
    found = path.stat()
    return _packed(str(path), found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=1)
def _packed(path: str, mtime_ns: int, size: int) -> Agent:
    with open(path, "rb") as file:
        program = file.read()
    return Agent(hashlib.sha256(program).hexdigest(), archive(program))


def archive(program: bytes, prefix: str = "") -> bytes:
    """Return a tar archive with `agent` and `run/` below `prefix`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, mode in ((prefix, 0o755), (f"{prefix}run", 0o1777 if prefix else 0o700)):
            if name:
                folder = tarfile.TarInfo(name.rstrip("/"))
                folder.type, folder.mode = tarfile.DIRTYPE, mode
                tar.addfile(folder)
        file = tarfile.TarInfo(f"{prefix}agent")
        file.mode, file.size = 0o755, len(program)
        tar.addfile(file, io.BytesIO(program))
    return buffer.getvalue()


_complete: set[tuple[str, str]] = set()


async def ensure(http: Http, agent: Agent, image: str) -> None:
    """Make sure that the volume exists. `image` is any image that the Docker engine has."""
    if (str(http.endpoint), agent.volume) in _complete:
        return
    for last_try in (False, True):
        try:
            async with asyncio.timeout(_WAIT_S):
                while not await _filled(http, agent) and not await finish(fill(http, agent, image)):  # noqa: ASYNC110
                    await asyncio.sleep(_PAUSE_S)
            _complete.add((str(http.endpoint), agent.volume))
            return
        except TimeoutError:
            if last_try:
                raise EngineError("the agent could not be put into the Docker engine in time") from None
            await _remove_filler(http, agent)


async def fill(http: Http, agent: Agent, image: str) -> bool:
    """Write the agent into the volume, which is created if it is missing. Returns False if another process is doing
    so."""
    mount = {
        "Type": "volume",
        "Source": agent.volume,
        "Target": HOME,
        "VolumeOptions": {"NoCopy": True, "Labels": {LABEL: agent.digest}},
    }
    body = {
        "Image": image,
        "Entrypoint": [PROGRAM],
        "Labels": {LABEL: agent.digest},
        "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
    }
    try:
        await http.call("POST", "/containers/create", query={"name": agent.volume}, body=body, timeout_s=SLOW_S)
    except RefusedError as error:
        if error.status == 409:
            return False
        raise EngineError(f"the agent could not be put into the Docker engine: {error.message}") from error
    try:
        await http.call(
            "PUT", f"/containers/{agent.volume}/archive", query={"path": HOME}, tar=agent.tar, timeout_s=SLOW_S
        )
    except RefusedError as error:
        await _remove_filler(http, agent)
        with suppress(RefusedError):
            await http.call("DELETE", f"/volumes/{agent.volume}", timeout_s=SLOW_S)
        raise EngineError(f"the agent could not be put into the Docker engine: {error.message}") from error
    await _remove_filler(http, agent)
    return True


def forget(http: Http, agent: Agent) -> None:
    """Forget that the volume exists, because it was removed. It is looked for again next time."""
    _complete.discard((str(http.endpoint), agent.volume))


async def _filled(http: Http, agent: Agent) -> bool:
    if not await _exists(http, f"/volumes/{agent.volume}"):
        return False
    return not await _exists(http, f"/containers/{agent.volume}/json")


async def _exists(http: Http, path: str) -> bool:
    try:
        await http.call("GET", path)
    except RefusedError as error:
        if error.status == 404:
            return False
        raise EngineError(f"the Docker engine cannot be queried: {error.message}") from error
    return True


async def _remove_filler(http: Http, agent: Agent) -> None:
    try:
        await http.call("DELETE", f"/containers/{agent.volume}", query={"force": "1"}, timeout_s=SLOW_S)
    except RefusedError as error:
        if error.status not in (404, 409):
            raise EngineError(f"a container of Atoll cannot be removed: {error.message}") from error
