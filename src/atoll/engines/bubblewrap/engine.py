"""The `bubblewrap` engine: bubblewrap with this machine's own programs."""

from __future__ import annotations

import functools
import json
import os
import re
import time
from contextlib import ExitStack
from pathlib import Path

from atoll import agent_binary
from atoll.claims import Claims
from atoll.engines.bubblewrap import bubblewrap_probe
from atoll.engines.bubblewrap.arguments import (
    TELLING,
    Descriptors,
    Surroundings,
    arguments,
    call_filter,
    check_targets,
    hidden_arguments,
    is_inside,
    volumes,
)
from atoll.engines.bubblewrap.base_files import DEFAULT_HOSTNAME, HOME, USER, base_files, hosts, sweep
from atoll.engines.bubblewrap.stopped_processes import StoppedProcesses
from atoll.engines.bubblewrap.users import Users
from atoll.engines.engine_traces import traced_engine
from atoll.engines.host.exclusion import Exclusion
from atoll.engines.host.process_ref import ProcessRef, each_process
from atoll.engines.process_tree import Launch, ProcessTreeEngine, Record, clean_environment
from atoll.errors import EngineUnavailableError, SandboxGoneError, SpecError, UnsupportedError
from atoll.model import Capability, Cause, Handle, Observation, SandboxSpec, State
from atoll.model.state import Availability
from atoll.settings import Settings
from atoll.waiting import Deadline

_PAUSE_S, _KEEP_S = 10.0, 1.0
_TOP_LEVEL = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


@traced_engine
class BubblewrapEngine(ProcessTreeEngine):
    """Sandboxes created by bubblewrap. If Atoll runs as root, each runs as a user id of its own on the host too."""

    name = "bubblewrap"
    directory = "process"  # the former name of the engine, under which directories of existing sandboxes were created
    capabilities = frozenset(
        {Capability.OPEN_FILES, Capability.SHM, Capability.VOLUMES, Capability.PAUSE, Capability.ISOLATION}
    )
    isolation = "namespaces"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._exclusion = Exclusion(self._records.home)
        self._kept: dict[str, float] = {}
        """When each paused sandbox was last checked. A check takes time for each of its processes."""
        machine = Claims("users", settings.data_dir) if os.geteuid() == 0 else None
        self._users = Users(settings.data_dir / self.directory / ".users", machine)

    @classmethod
    def probe(cls, settings: Settings, *, thorough: bool) -> Availability:
        return bubblewrap_probe.probe(cls.name, thorough=thorough)

    async def inspect(self, handle: Handle) -> Observation:
        seen = await super().inspect(handle)
        still = self._stopped_processes(handle) if seen.state is State.RUNNING else None
        if still is None or not still.is_noted:
            return seen
        now = time.monotonic()
        if now >= self._kept.get(handle.sandbox_id, 0.0) + _KEEP_S:
            # Whoever resumes the sandbox waits, so that nothing is stopped after it.
            with self._exclusion.at_once(handle.sandbox_id) as alone:
                if alone and still.is_noted:
                    self._kept = {id: at for id, at in self._kept.items() if at + _KEEP_S > now}
                    self._kept[handle.sandbox_id] = now
                    await still.keep()
        return Observation(State.PAUSED)

    async def pause(self, handle: Handle) -> None:
        async with self._exclusion.alone(handle.sandbox_id):
            await self._living(handle).stop(Deadline.after(_PAUSE_S))

    async def resume(self, handle: Handle) -> None:
        async with self._exclusion.alone(handle.sandbox_id):
            await self._living(handle).let_go()

    def _living(self, handle: Handle) -> StoppedProcesses:
        still = self._stopped_processes(handle)
        if still is None:
            raise SandboxGoneError(f"sandbox '{handle.sandbox_id}' has ended", cause=Cause.LOST)
        return still

    def _stopped_processes(self, handle: Handle) -> StoppedProcesses | None:
        record = self._records.read(handle.sandbox_id)
        if record is None or record.init is None or not record.is_of_this_boot() or not record.init.is_alive():
            return None
        return StoppedProcesses(self._records.home(handle.sandbox_id), record.init)

    def _check(self, spec: SandboxSpec) -> None:
        self._check_image(spec.image)
        if spec.isolation not in (None, "namespaces"):
            raise UnsupportedError(
                f"engine '{self.name}' cannot isolate by {spec.isolation}",
                hint="It isolates by namespaces; choose another engine.",
            )
        check_targets(spec)
        for mount in volumes(spec):
            for own in (self._settings.data_dir, self._settings.run_dir):
                if is_inside(mount.source, os.path.realpath(own)) or is_inside(os.path.realpath(own), mount.source):
                    raise SpecError(f"the volume '{mount.source}' would show other sandboxes' files, in '{own}'")

    def _claim_user(self, sandbox_id: str) -> int | None:
        return self._users.claim(sandbox_id) if os.geteuid() == 0 else None

    def _release_user(self, uid: int) -> None:
        self._users.release(uid)

    def _sweep(self) -> None:
        self._users.sweep(self._records)
        sweep(self._settings.data_dir / self.directory)

    def _launch(self, record: Record, home: Path, listener: int, resources: ExitStack) -> Launch:
        bubblewrap, agent = bubblewrap_probe.find_bubblewrap(), agent_binary.path()
        self._make_directories(home, record.uid)
        environment = clean_environment(record.sandbox_id, record.spec, HOME, USER)
        other_name = record.spec.hostname != DEFAULT_HOSTNAME
        fds = Descriptors(
            listener=listener,
            info=_memory_file(b"", resources),
            hidden=_memory_file(b"", resources),
            hosts=_memory_file(hosts(record.spec.hostname).encode(), resources) if other_name else None,
            filter=_memory_file(call_filter(refuses_set_id=record.spec.has_writable_volume), resources),
        )
        links, directories = _top_level()
        around = Surroundings(home, base_files(home.parent, agent), links, directories, fds, _covered())
        words = arguments(record.spec.model_copy(update={"limits": record.limits}), around)
        seen = words.index("--args")
        os.pwrite(fds.hidden, hidden_arguments(words[:seen], environment), 0)
        user = "same" if record.uid is None else f"{record.uid}:{record.uid}"
        fresh = [str(agent), "--as", user, "--own-files", str(around.base), "--"]
        return Launch(
            argv=[*fresh, bubblewrap, *words[seen:]],
            env={"PATH": os.defpath, "LANG": "C.UTF-8", _MAKING: str(home / "work")},
            fds=[fd for fd in (fds.info, fds.hidden, fds.hosts, fds.filter) if fd is not None],
            init=lambda monitor: _first_inside(fds.info),
            session=False,
        )

    def _make_directories(self, home: Path, uid: int | None) -> None:
        for name in ("work", "home", "tmp"):
            (home / name).mkdir(mode=0o700)
            if uid is not None:
                os.chown(home / name, uid, uid)
        if uid is not None:
            for folder in home.parents:
                if not folder.stat().st_mode & 0o001:
                    raise EngineUnavailableError(
                        f"sandboxes run as users of their own, who may not pass through '{folder}'",
                        hint=f"Run 'chmod o+x {folder}', or set ATOLL_DATA_DIR to another directory.",
                    )

    def _find_processes(self, sandbox_id: str) -> set[ProcessRef]:
        return _processes_of(self._records.home(sandbox_id) / "work")


_MAKING = "ATOLL_MAKING"
"""An environment variable of bubblewrap itself, never of the sandbox, that names the work directory."""


def _processes_of(work: Path) -> set[ProcessRef]:
    """Find the processes of the sandbox with this work directory by what the kernel reports, without its record.

    These are the bubblewrap that makes the sandbox, and every process with the directory among its mounts.
    """
    mounted = _as_mounted(work)
    everyone = (ProcessRef.of(pid) for pid in each_process())
    return {process for process in everyone if process and (_makes(process.pid, work) or _has(process.pid, mounted))}


def _makes(pid: int, work: Path) -> bool:
    """Whether the process is a bubblewrap that makes this sandbox.

    Its environment says so, which other users cannot read. In earlier versions its command line did.
    """
    if f"{_MAKING}={work}".encode(errors="surrogateescape") in _read_file(f"/proc/{pid}/environ").split(b"\0"):
        return True
    words = _read_file(f"/proc/{pid}/cmdline").split(b"\0")
    return b"--as-pid-1" in words and os.fsencode(work) in words


def _has(pid: int, mounted: tuple[bytes, bytes] | None) -> bool:
    if mounted is None:
        return False
    lines = _read_file(f"/proc/{pid}/mountinfo").splitlines()
    return any(tuple(line.split(b" ", 4)[2:4]) == mounted for line in lines)


def _as_mounted(path: Path) -> tuple[bytes, bytes] | None:
    """Return the device and the path within it as a mount table shows them, where paths begin at the file system."""
    wanted = _escaped(os.fsencode(os.path.realpath(path)))
    best: tuple[int, bytes, bytes] | None = None
    for line in _read_file("/proc/self/mountinfo").splitlines():
        _, _, device, root, point, _ = line.split(b" ", 5)
        prefix = point.rstrip(b"/")
        # Of two mounts on one directory the later one is seen.
        if wanted.startswith(prefix + b"/") and (best is None or len(prefix) >= best[0]):
            best = (len(prefix), device, root.rstrip(b"/") + wanted[len(prefix) :])
    return (best[1], best[2]) if best else None


def _escaped(path: bytes) -> bytes:
    return re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % found[0][0], path)


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _first_inside(info: int) -> ProcessRef | None:
    try:
        return ProcessRef.of(int(json.loads(os.pread(info, 4096, 0))["child-pid"]))
    except (ValueError, KeyError, TypeError):
        return None


def _memory_file(content: bytes, resources: ExitStack) -> int:
    fd = os.memfd_create("atoll")
    resources.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@functools.cache
def _covered() -> tuple[str, ...]:
    return tuple(name for name in TELLING if os.path.isfile(f"/proc/{name}"))


@functools.cache
def _top_level() -> tuple[dict[str, str], tuple[str, ...]]:
    """Return which of /bin, /lib and so on are links into /usr on this host, and which are directories."""
    links = {path: os.readlink(path) for path in _TOP_LEVEL if os.path.islink(path)}
    links = {path: target for path, target in links.items() if target.lstrip("/").startswith("usr/")}
    return links, tuple(path for path in _TOP_LEVEL if os.path.isdir(path) and not os.path.islink(path))
