"""What the attack suite shares: engines to attack, the weak control, canaries, and a look at the host around it all."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.bubblewrap.engine import BubblewrapEngine
from atoll.engines.contract import Engine
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.errors import SandboxError
from atoll.model import ExecutionResult
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from needs import missing, need
from security import host_state
from security.canaries import Canaries, WatchedSandbox
from security.weak import Weak

PIDS = 256
REFUSED = (OSError, ValueError, SandboxError)
"""How a call on files may be refused."""
"""Every sandbox whose processes are the host's has a limit. Nothing that forks without end is run without one."""

_GVISOR, _SLOW_CRUN = (pytest.param(name, marks=pytest.mark.slow) for name in ("runsc", "crun"))
_CRUN = pytest.param("crun", marks=pytest.mark.again)
RUNC = pytest.mark.parametrize("target", ["runc"], indirect=True)
NAMESPACES = pytest.mark.parametrize("target", ["native", "runc", _CRUN], indirect=True)
OCI = pytest.mark.parametrize("target", ["runc", _CRUN, _GVISOR], indirect=True)
IDS = pytest.mark.parametrize("target", ["native", "runc", _CRUN, _GVISOR], indirect=True)
_RUNC = pytest.param("runc", marks=pytest.mark.again)
EVERY = pytest.mark.parametrize("target", ["native", _RUNC, "process", _SLOW_CRUN, _GVISOR], indirect=True)
WITH_GVISOR = pytest.mark.parametrize("target", ["native", _RUNC, _CRUN, "process", "runsc"], indirect=True)
"""gVisor takes seconds to start, and for calls on files and commands all runtimes are alike: with most cases they are
left to the slow suite."""

_GET_RUNSC = Path(__file__).parents[2] / "scripts" / "get-runsc"


@dataclass(frozen=True, slots=True)
class Target:
    """One engine to attack."""

    name: str
    engine: Engine
    settings: Settings
    canaries: Canaries

    @property
    def is_virtual(self) -> bool:
        return self.name == "runsc"

    @property
    def linux(self) -> LinuxEngine:
        assert isinstance(self.engine, LinuxEngine)
        return self.engine

    def sandbox(self, **wanted: Any) -> WatchedSandbox:
        made = WatchedSandbox(engine=self.engine, settings=self.settings, **self._complete(wanted))
        made.canaries = self.canaries
        return made

    def peer(self, **wanted: Any) -> AsyncSandbox:
        """One whose output is not searched: it may hold canaries of its own."""
        return AsyncSandbox(engine=self.engine, settings=self.settings, **self._complete(wanted))

    def _complete(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if self.name == "process":
            return {name: value for name, value in wanted.items() if name not in ("pids", "memory", "disk", "cpus")}
        if self.is_virtual:  # its processes are no processes of the host, and nobody counts them
            return {"isolation": "gvisor"} | {name: value for name, value in wanted.items() if name != "pids"}
        return {"pids": PIDS} | wanted


@pytest.fixture(scope="session")
def root() -> None:
    need("root")
    if not Hierarchy.find().writable():
        missing("the attack suite needs control groups that can be written to")


@pytest.fixture(scope="session")
def folder(session_folder: Path) -> Path:
    """All that the suite makes is in here."""
    path = session_folder / "s"
    path.mkdir(mode=0o755)
    return path


@pytest.fixture
def place(folder: Path) -> Iterator[Path]:
    """A directory of the host for one test, that everybody can reach."""
    path = Path(tempfile.mkdtemp(dir=folder))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def settings(root: None, folder: Path) -> Settings:
    return Settings(folder / "d", folder / "r")


@pytest.fixture(scope="session")
def canaries(folder: Path) -> Iterator[Canaries]:
    """The host's secrets: in a file, in our environment, and in its shared memory."""
    made = Canaries()
    secret = folder / "secret"
    secret.mkdir(mode=0o755)
    (secret / "canary.txt").write_text(made.new("a file of the host"))
    shared = Path(f"/dev/shm/atoll-canary-{os.getpid()}")
    shared.write_text(made.new("shared memory of the host"))
    os.environ["ATOLL_TEST_SECRET"] = made.new("the engine's environment")
    yield made
    del os.environ["ATOLL_TEST_SECRET"]
    shared.unlink()


@pytest.fixture(scope="session")
def host_secret(folder: Path, canaries: Canaries) -> Path:
    """A file of the host that everybody on the host may read."""
    return folder / "secret" / "canary.txt"


@pytest.fixture(scope="session")
def weak(root: None, folder: Path, host_secret: Path) -> Weak:
    """The positive control. A payload that does not fire here proves nothing elsewhere."""
    need("crun")
    path = folder / "w"
    path.mkdir()
    return Weak(path, host_secret)


@pytest.fixture(scope="session")
def runsc(folder: Path) -> Path:
    found = locate("runsc", Settings.load().data_dir)
    if found is None:
        done = subprocess.run([_GET_RUNSC, folder / "programs"], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            missing(f"needs runsc: {done.stderr[-300:]}")
        found = folder / "programs" / "runsc"
    return found


@pytest.fixture(scope="session")
def prepared(root: None, settings: Settings, folder: Path) -> None:
    """A first sandbox, so that what an installation makes once is there before the host is looked at."""

    async def make() -> None:
        for engine in (OciEngine(settings), NativeEngine(settings), BubblewrapEngine(settings)):
            async with AsyncSandbox(engine=engine, settings=settings):
                pass
            await engine.aclose()

    asyncio.run(make())


@pytest.fixture(scope="module", autouse=True)
def host_is_as_before(prepared: None, settings: Settings, folder: Path, canaries: Canaries) -> Iterator[None]:
    """Around each module: no process, mount, group, namespace, loop device or file is left; no program was changed."""
    before = host_state.settled(settings, folder)
    yield
    after = host_state.settled(settings, folder)
    assert replace(after, programs=()) == replace(before, programs=())
    assert set(before.programs) <= set(after.programs)
    assert before.processes == before.mounts == before.groups == before.loops == before.files == ()


@pytest.fixture(autouse=True)
def devices_are_as_before() -> Iterator[None]:
    """Around each test: the host's own /dev/null and its like keep their modes."""
    before = host_state.devices()
    yield
    after = host_state.devices()
    host_state.put_right(before)
    assert after == before


@pytest.fixture
async def target(
    request: pytest.FixtureRequest, settings: Settings, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Target]:
    """`@pytest.mark.parametrize("target", [...], indirect=True)` names engines: a runtime, `native` or `process`."""
    name: str = request.param
    if name == "process":
        need("bwrap")
        engine: Engine = BubblewrapEngine(settings)
    elif name == "native":
        engine = NativeEngine(settings)
    else:
        if name == "runsc":
            monkeypatch.setenv("ATOLL_RUNSC", str(request.getfixturevalue("runsc")))
        elif locate(name, settings.data_dir) is None:
            missing(f"needs {name}")
        engine = OciEngine(settings, None if name == "runsc" else name)
    yield Target(name, engine, settings, canaries)
    for handle in await engine.list():
        await engine.delete(handle)
    await engine.aclose()


# --- payloads ---------------------------------------------------------------------------------------------------------

PRELUDE = """
import ctypes, errno, json, os, re, resource, signal, socket, stat, struct, subprocess, sys, threading, time
LIBC = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    words = [ctypes.c_void_p(word) if isinstance(word, int) else word for word in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *words)
    return result, "" if result >= 0 else errno.errorcode.get(ctypes.get_errno(), "?")
def attempt(function, *arguments):
    try:
        function(*arguments)
        return "PWNED"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
def say(value):
    print(json.dumps(value))
"""
PYTHON = ["python3", "-I", "-"]


async def inside(sandbox: AsyncSandbox, payload: str, user: str | None = None, timeout: float = 30.0) -> Any:
    """What the payload said, from inside the sandbox. It must have run to its end: a crash is no wall."""
    result = await sandbox.exec(PYTHON, stdin=PRELUDE + payload, user=user, timeout=timeout, max_output_bytes=64 << 20)
    return parsed(result)


def parsed(result: ExecutionResult) -> Any:
    assert result.success, f"the payload itself failed: {result.exit_code} {result.cause}\n{result.stderr[-1500:]}"
    return json.loads(result.stdout.splitlines()[-1])


def in_the_open(weak: Weak, payload: str, **options: Any) -> Any:
    """The same where there are no walls."""
    said = weak.run(PYTHON, stdin=(PRELUDE + payload).encode(), **options)
    assert said.status == 0, said.text[-1500:]
    return json.loads(said.text.splitlines()[-1])
