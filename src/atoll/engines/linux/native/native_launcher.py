"""Makes sandboxes with `atoll-native`, Atoll's own launcher. It makes a sandbox and ends, so there is no OCI runtime,
no daemon and no other process that stays."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.host import agent_socket
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.confinement import bpf
from atoll.engines.host.confinement.seccomp import Profile, SetId, profile
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux import launcher_protocol
from atoll.engines.linux.launcher import Isolation, Launcher, Progress, SharedKernelLauncher
from atoll.engines.linux.launcher_protocol import Joining
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.materials import MaterialStore, plan_for
from atoll.engines.linux.native import launcher_process, native_probe
from atoll.engines.linux.native.launcher_process import LauncherPool
from atoll.engines.linux.native.rootless import UserNamespace
from atoll.engines.linux.plan.sandbox_plan import HostFacts, Plan, for_rootless
from atoll.engines.linux.volume_guard import supervisor
from atoll.errors import EngineError, EngineUnavailableError, UnsupportedError
from atoll.images import Image
from atoll.model import Capability, SandboxSpec
from atoll.model.handle import ISOLATION
from atoll.waiting import Deadline

NAME = "native"
_LISTENER_FD = "3"


class NativeLauncher(SharedKernelLauncher):
    """Implements `Launcher` and, as the only launcher of its engine, `Launchers` too."""

    name = NAME
    handle_details: Mapping[str, str] = MappingProxyType({ISOLATION: SharedKernelLauncher.isolation})

    def __init__(self, layout: SandboxLayout, namespace: UserNamespace | None) -> None:
        """`namespace` is the user namespace in which an ordinary user is root. None: Atoll runs as root."""
        super().__init__(layout)
        self._namespace = namespace
        self._materials = MaterialStore(layout)
        self.pool = LauncherPool()
        self._program: str | None = None
        self._run_dir: Path | None = None

    # --- the launchers of its engine ---------------------------------------------------------------------------------

    def choose(self, spec: SandboxSpec) -> Launcher:
        if spec.isolation not in (None, self.isolation):
            raise UnsupportedError(f"engine '{NAME}' has no isolation '{spec.isolation}'", hint="Choose engine 'oci'.")
        return self

    def named(self, name: str) -> Launcher:
        if name != NAME:
            raise EngineUnavailableError(f"engine '{NAME}' has no launcher '{name}'")
        return self

    def of_handle(self, details: Mapping[str, str]) -> Launcher:
        return self

    def has(self, name: str) -> bool:
        return name == NAME

    def lacks(self, isolation: Isolation) -> frozenset[Capability]:
        single = self._namespace is not None and self._namespace.ranges is None
        return frozenset((Capability.SAVED_MEMORY, *((Capability.USERS,) if single else ())))

    def levels(self) -> tuple[Isolation, ...]:
        return (self.isolation,)

    def forget(self, sandbox_id: str) -> None:
        """Do nothing: this launcher prepares no connections."""

    def rest(self) -> None:
        if self._program is not None:
            self.pool.prepare_now(self._program)

    async def aclose(self) -> None:
        self.pool.close()
        if self._namespace is not None:
            self._namespace.close()

    # --- the launcher ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._program is None:
            if problems := native_probe.problems():
                reason, hint = next(iter(problems.items()))
                raise EngineUnavailableError(reason, hint=hint)
            self._program = str(launcher_process.program())

    async def start(self, record: Record, image: Image | None, progress: Progress, deadline: Deadline) -> ProcessRef:
        self.check()
        assert self._program is not None
        with ExitStack() as opened:
            taken = self.pool.take(self._program)
            undo = opened.enter_context(ExitStack())
            if taken is not None:
                undo.callback(self.pool.put_away, taken)
                progress.network_exists(taken.pid)
            plan, joining, agent_file = await finish(workers.run(workers.ENGINE, self._prepare, record, image))
            undo.pop_all()
            chosen = self.pool.fitting(taken, self._program, launcher_protocol.early_operations(plan, joining))
            opened.callback(self.pool.put_away, chosen)
            listener = opened.enter_context(agent_socket.listen(self._layout.socket(record.sandbox_id)))
            agent = os.open(agent_file, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, agent)
            lists = (*launcher_protocol.sandbox_operations(plan, joining), _filter(plan.seccomp, plan.machine))
            known = False
            if not self._layout.hierarchy.controllers and (first := await chosen.wait_for_first(deadline)) is not None:
                # Without a control group the process can be found only by its id, so the id is recorded before the
                # process is told to go on.
                known = progress.first_process(first)
            fds = [listener.fileno(), agent]
            if plan.is_supervised:
                fds.append(await self._supervisor(joining, deadline, opened))
            chosen.tell(lists, fds, deadline)
            # Connect now, so that the agent finds a caller waiting when it starts.
            caller = opened.enter_context(await _call(self._layout.socket(record.sandbox_id), deadline))
            listener.close()  # only the agent has it now, so the connection breaks if there is no agent
            # Record the first process while the rest is made.
            if not known and (first := chosen.first()) is not None:
                progress.first_process(first)
            init = ProcessRef.of(await chosen.outcome(caller, deadline))
            if init is None:
                raise EngineError("the sandbox ended while it was being made")
        self.pool.prepare_soon(self._program)
        return init

    async def _supervisor(self, joining: Joining, deadline: Deadline, opened: ExitStack) -> int:
        groups = joining.lists if joining.born_in is None else (joining.born_in / "cgroup.procs",)
        return await supervisor(self._layout.mounter(), groups, deadline, opened)

    def _prepare(self, record: Record, image: Image | None) -> tuple[Plan, Joining, Path]:
        """Claim what the sandbox needs. Blocks, because the file system of the layers may be busy."""
        self._make_run(record.sandbox_id)
        ids = self._layout.ids.claim(record.sandbox_id) if self._namespace is None else self._namespace.ids
        materials = self._materials.take(record, image)
        # All users of the machine can read the arguments, so they do not name the sandbox.
        argv = ("atoll-agent", "--listen-fd", _LISTENER_FD, "--work-dir", record.spec.directory)
        plan = plan_for(self._layout, record, materials, _facts(), ids, argv)
        if self._namespace is not None:
            plan = for_rootless(plan)
            self.pool.fds = (self._namespace.open(),)
        return plan, _joining(self._layout.make_group(record, plan.cgroup)), materials.agent

    def _make_run(self, sandbox_id: str) -> None:
        if self._run_dir is None:
            self._run_dir = self._layout.make_run(sandbox_id).parent
            return
        self._layout.settings.socket_path("oci", f"{sandbox_id}/s")
        os.mkdir(self._run_dir / sandbox_id, 0o700)


def _joining(group: Group) -> Joining:
    if group.hierarchy.mode == "v2":
        return Joining(born_in=group.directory("freezer"))
    # Moving a single thread with `tasks` avoids the machine-wide lock that `cgroup.procs` takes.
    directories = dict.fromkeys(group.directory(name) for name in group.hierarchy.controllers)
    lists = tuple(directory / "tasks" for directory in directories if directory is not None)
    return Joining(lists, devices=group.directory("devices"))


async def _call(path: Path, deadline: Deadline) -> socket.socket:
    caller = await agent_socket.connect(path, deadline)
    agent_socket.hang_up(caller)
    return caller


@functools.cache
def _facts() -> HostFacts:
    return HostFacts(os.uname().machine, os.cpu_count() or 1)


def _filter(wanted: Profile, machine: str) -> bytes:
    # Comparing profiles by value takes longer than assembling a filter, so only these are cached, by identity.
    known: tuple[SetId, ...] = ("allowed", "contained", "supervised")
    for set_id in known:
        if wanted is profile(set_id):
            return _known_filter(set_id, machine)
    return bpf.assemble(wanted, machine)


@functools.cache
def _known_filter(set_id: SetId, machine: str) -> bytes:
    return bpf.assemble(profile(set_id), machine)
