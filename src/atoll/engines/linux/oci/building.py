"""Making a sandbox: from its record to an agent that answers. Whatever fails, `ending.py` finds all that was made by
its name."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from atoll import workers
from atoll.engines.linux import bpf, host_copies, host_view, oci_bundle, stage
from atoll.engines.linux.oci import checkpoints, links, runtimes, start
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.record import Record
from atoll.engines.linux.oci.runtimes import Runtime
from atoll.engines.linux.oci.supervising import supervisor
from atoll.engines.linux.plan import Bind, CgroupLimits, HostFacts, Plan, Root, for_virtual_kernel, make_plan
from atoll.engines.linux.seccomp import Profile
from atoll.engines.local import sockets
from atoll.engines.local.processes import ProcessRef
from atoll.engines.local.waiting import Deadline, finish
from atoll.errors import AgentUnreachableError, EngineError, ImageError, SpecError
from atoll.images import Image
from atoll.model import SandboxSpec

_FIRST_FD = 3
_IMAGE_STEPS = ("place /dev", "place /proc", "place /sys", "mount ", "place ", "root ", "directory ")

AGENT, AGENT_SOCKET = "/.atoll-agent", "/.atoll-socket"
"""Inside a sandbox whose kernel is virtual; elsewhere the agent is no file and its socket no path."""


@dataclass(frozen=True, slots=True)
class Built:
    init: ProcessRef
    """The sandbox's first process on this machine."""
    stream: socket.socket | None = None
    """A first connection to the agent, where one comes with the start."""


class Builder:
    def __init__(self, places: Places) -> None:
        self._places = places

    async def build(self, record: Record, runtime: Runtime, deadline: Deadline) -> Built:
        check_volumes(record.spec)
        image = await checkpoints.acquire(self._places, record)
        if not runtime.virtual_kernel:
            plan = await finish(workers.run(workers.ENGINE, self._plan, record, runtime, image))
            return await self._run(plan, runtime, deadline)
        with ExitStack() as opened:
            linked = None
            if record.spec.network != "none":
                runtime = dataclasses.replace(runtime, network="sandbox")
                linked = await finish(workers.run(workers.ENGINE, links.prepared, self._places.gateway, record, opened))
            plan = await finish(workers.run(workers.ENGINE, self._plan, record, runtime, image, linked))
            memory = self._places.memory(record.memory) if record.memory is not None else None
            return await self._run_virtual(plan, runtime, deadline, memory)

    async def _run(self, plan: Plan, runtime: Runtime, deadline: Deadline) -> Built:
        """The agent inherits a socket that listens."""
        run = self._places.run(plan.sandbox_id)
        with ExitStack() as opened:
            listener = opened.enter_context(sockets.listen(run / "s"))
            fds = [listener.fileno(), *(_open(path, opened) for path in (self._places.mounter(), self._places.agent()))]
            fds += [_memory_file(stage.covers(plan), opened), _memory_file(_filter(plan.seccomp, plan.machine), opened)]
            if plan.is_supervised:
                fds.append(await self._supervisor(plan, deadline, opened))
            fds.append(self._operations(plan, runtime, opened))
            finished = await start.run(
                self._command(plan, runtime, len(fds)), fds, deadline, report=True, what=runtime.name
            )
        init = self._started(plan, runtime, finished)
        await self._knock(plan, init, deadline)
        return Built(init)

    async def _run_virtual(self, plan: Plan, runtime: Runtime, deadline: Deadline, memory: Path | None) -> Built:
        """The agent's standard streams are one end of a socket pair; later connections go through the runtime.

        An agent that wakes up from `memory` had that connection closed before, so it is of no use then.
        """
        ours, theirs = socket.socketpair()
        with ExitStack() as opened:
            opened.callback(theirs.close)
            undo = opened.enter_context(ExitStack())
            undo.callback(ours.close)
            null = start.nothing()
            opened.callback(os.close, null)
            fds = []
            if plan.is_supervised:
                fds.append(_memory_file(_filter(plan.seccomp, plan.machine), opened))
                fds.append(await self._supervisor(plan, deadline, opened, virtual_kernel=True))
            guard = (_FIRST_FD, _FIRST_FD + 1) if fds else None
            fds.append(self._operations(plan, runtime, opened, guard))
            stdio = (theirs.fileno(), theirs.fileno(), null)
            finished = await start.run(
                self._command(plan, runtime, len(fds), memory),
                fds,
                deadline,
                stdio=stdio,
                report=True,
                what=runtime.name,
            )
            init = self._started(plan, runtime, finished)
            if memory is not None:
                return Built(init)
            undo.pop_all()
        ours.setblocking(False)
        return Built(init, ours)

    async def _supervisor(
        self, plan: Plan, deadline: Deadline, opened: ExitStack, *, virtual_kernel: bool = False
    ) -> int:
        # Runtimes refuse a group for the sandbox that somebody is in, so it enters that afterwards.
        group = self._places.group(plan.sandbox_id)
        own = dict.fromkeys(group.directory(name) for name in group.hierarchy.controllers)
        return await supervisor(
            self._places.mounter(),
            self._lists(plan),
            deadline,
            opened,
            lasting=[directory / "cgroup.procs" for directory in own if directory is not None],
            virtual_kernel=virtual_kernel,
        )

    def _lists(self, plan: Plan) -> list[Path]:
        return [directory / "cgroup.procs" for directory in self._places.starting(plan.sandbox_id).directories()]

    def _operations(self, plan: Plan, runtime: Runtime, opened: ExitStack, guard: tuple[int, int] | None = None) -> int:
        staged = self._places.stage(runtime.program)
        return _memory_file(stage.operations(plan, staged, self._lists(plan), guard), opened)

    def _plan(self, record: Record, runtime: Runtime, image: Image | None, linked: str | None = None) -> Plan:
        """Claim what the sandbox needs and write its bundle."""
        places, sandbox_id = self._places, record.sandbox_id
        run = places.make_run(sandbox_id)
        places.starting(sandbox_id).create(CgroupLimits())
        # runc and crun set the limits; as long as this group is there nobody removes those above it.
        group = places.make_group(record, CgroupLimits(), virtual=runtime.isolation == "gvisor")
        ids = places.ids.claim(sandbox_id)
        host = host_view.skeleton(places.data / "host")
        below = host / host_view.INNER if image is None or image.root is None else image.root
        layer = checkpoints.layer_for(places, record, below)
        if image is None or image.root is None:
            number = host_copies.number_of(record.account or "")
            copies = host_copies.copies(places.data / "host-copies", number, host_view.USR)
            root = Root((host,), layer.path, host_view.INNER, host_view.USR, copies)
            env = {}
        else:
            root = Root((places.top(image.root.name), image.root.parent), layer.path, image.root.name)
            env = image.config.env
        facts = HostFacts(
            platform.machine(),
            os.cpu_count() or 1,
            hide_unified_cgroup=runtime.name == "crun" and places.hierarchy.mode == "hybrid",
        )
        reach = (
            ("--stdio", "--listen-path", AGENT_SOCKET)
            if runtime.virtual_kernel
            else ("--listen-fd", str(oci_bundle.SOCKET_FD))
        )
        if runtime.isolation == "gvisor":
            reach = (*reach, "--gvisor")
        argv = (AGENT, *reach, "--work-dir", record.spec.work_dir)
        files = places.network_files(sandbox_id, record.spec, root)
        env = {**env, **places.network_variables(record.spec)}
        plan = make_plan(
            record.limited_spec(), facts, root, ids, sandbox_id=sandbox_id, argv=argv, env=env, files=files
        )
        plan = dataclasses.replace(plan, network_path=linked)
        render = oci_bundle.config
        if runtime.virtual_kernel:
            plan, render = for_virtual_kernel(plan, places.agent(0o755), AGENT), oci_bundle.virtual_config
            group.limit(plan.cgroup)  # runsc takes a group that is there as it is
        bundle = render(plan, places.stage(runtime.program), group.path)
        (run / "config.json").write_text(json.dumps(bundle, separators=(",", ":")))
        return plan

    def _command(self, plan: Plan, runtime: Runtime, fds: int, memory: Path | None = None) -> list[str]:
        """`atoll-mount`, told the list of operations (the last of `fds`) and where to report, and then the runtime."""
        run, list_fd = self._places.run(plan.sandbox_id), _FIRST_FD + fds - 1
        words = ["run"] if memory is None else ["restore", "--image-path", str(memory)]
        words += ["--detach", "--bundle", str(run), "--pid-file", str(run / "pid")]
        if list_fd > _FIRST_FD and not runtime.virtual_kernel:
            words += ["--preserve-fds", str(list_fd - _FIRST_FD)]
        command = runtime.command(run / "runtime", *words, plan.sandbox_id, log=run / "log")
        return [str(self._places.mounter()), "prepare", str(list_fd), str(list_fd + 1), "--", *command]

    def _started(self, plan: Plan, runtime: Runtime, finished: start.Finished) -> ProcessRef:
        run = self._places.run(plan.sandbox_id)
        if finished.status != 0:
            raise _failure(plan, runtime, finished, run / "log")
        init = _process_in(run / "pid")
        # What is in no control group of ours is not ours, whatever a broken runtime writes down.
        if init is None or not init.is_alive() or init.pid not in self._places.group(plan.sandbox_id).pids():
            raise EngineError(f"{runtime.name} says that it started the sandbox, but no process is there")
        return init

    async def _knock(self, plan: Plan, init: ProcessRef, deadline: Deadline) -> None:
        """Wait until the agent serves its socket."""
        pidfd, answered = init.open(), False
        try:
            if pidfd is not None:
                answered = await sockets.knock(self._places.socket(plan.sandbox_id), pidfd, deadline)
        except TimeoutError:
            raise AgentUnreachableError("the agent of the new sandbox did not answer in time") from None
        except OSError:
            answered = False
        finally:
            if pidfd is not None:
                os.close(pidfd)
        if not answered:
            raise EngineError(
                "the sandbox ended while it was being made",
                hint="'atoll doctor' checks what is needed on this machine.",
            )


def check_volumes(spec: SandboxSpec) -> None:
    for volume in spec.volumes:
        if not os.path.exists(volume.host):
            raise SpecError(f"the volume's directory '{volume.host}' does not exist on this machine")
        if (real := os.path.realpath(volume.host)) != os.path.normpath(volume.host):
            # What the launcher would refuse too: another sandbox may have made that link.
            raise SpecError(
                f"the path of the volume '{volume.host}' goes through a symbolic link",
                hint=f"If you trust it, name the real path: {real}",
            )
        if not volume.read_only and os.geteuid() == 0:
            _check_owner(volume.host, os.stat(volume.host))


def _check_owner(path: str, info: os.stat_result) -> None:
    """What the launcher would refuse too: root inside is the owner of what it may write to."""
    if info.st_uid == 0 or info.st_gid == 0:
        whose = "root" if info.st_uid == 0 else "root's group"
        raise SpecError(
            f"the volume '{path}' belongs to {whose}, so a sandbox may not write to it",
            hint=f"Give it to an ordinary user ('chown USER:GROUP {path}'), or mount it read-only.",
        )


def _failure(plan: Plan, runtime: Runtime, finished: start.Finished, log: Path) -> Exception:
    for mount in plan.mounts:
        if isinstance(mount, Bind) and finished.said.startswith(place := f"place {mount.target}: "):
            return SpecError(f"a volume cannot be mounted on '{mount.target}': {finished.said.removeprefix(place)}")
    if finished.said:
        kind = ImageError if finished.said.startswith(_IMAGE_STEPS) else EngineError
        return kind(f"the sandbox's file tree could not be made: {finished.said}")
    how = f"killed by signal {-finished.status}" if finished.status < 0 else f"ended with status {finished.status}"
    said = runtimes.last_error(log)
    return EngineError(
        f"{runtime.name} {how}{': ' + said if said else ''}",
        hint="'atoll doctor' checks what is needed on this machine.",
    )


@functools.lru_cache(4)
def _filter(profile: Profile, machine: str) -> bytes:
    return bpf.assemble(profile, machine)


def _process_in(path: Path) -> ProcessRef | None:
    try:
        text = path.read_bytes()[:20].strip()
        return ProcessRef.of(int(text)) if text.isdigit() else None
    except OSError:
        return None


def _open(path: Path, opened: ExitStack) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, fd)
    return fd


def _memory_file(content: bytes, opened: ExitStack) -> int:
    fd = os.memfd_create("operations", os.MFD_CLOEXEC)
    opened.callback(os.close, fd)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
