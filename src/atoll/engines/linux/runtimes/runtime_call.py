"""Calls an OCI runtime: prepares its bundle and control groups, makes its command lines, and interprets its errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from atoll.engines.host import run_program
from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.confinement import bpf
from atoll.engines.host.confinement.seccomp import Profile
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux import launcher_protocol
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.materials import MaterialStore, plan_for
from atoll.engines.linux.plan.sandbox_plan import Bind, HostFacts, Plan
from atoll.engines.linux.runtimes import oci_bundle, oci_runtimes
from atoll.engines.linux.runtimes.oci_runtimes import Runtime
from atoll.engines.linux.volume_guard import supervisor
from atoll.errors import EngineError, EngineUnavailableError, ImageError, SpecError
from atoll.images import Image
from atoll.model.handle import ISOLATION
from atoll.waiting import Deadline

FIRST_FD = 3
"""The first of the descriptors that `atoll-mount` and the OCI runtime get."""
AGENT, AGENT_SOCKET = "/.atoll-agent", "/.atoll-socket"
"""The paths of the agent and its socket inside a sandbox with a virtual kernel. In other sandboxes they have no
paths."""

Render = Callable[[Plan, Path, str], oci_bundle.Json]


class RuntimeCall:
    """The calls of one OCI runtime."""

    def __init__(self, layout: SandboxLayout, name: str) -> None:
        self._layout = layout
        self._name = name
        self._materials = MaterialStore(layout)
        self.handle_details: Mapping[str, str] = {"runtime": name, ISOLATION: oci_runtimes.isolation_of(name)}

    def runtime(self, network: str = "none") -> Runtime:
        program = oci_runtimes.locate(self._name, self._layout.settings.data_dir)
        if program is None:
            raise EngineUnavailableError(f"{self._name} is no longer installed")
        return Runtime(self._name, program, network)

    # --- before ------------------------------------------------------------------------------------------------------

    def make_groups(self, record: Record, *, virtual: bool = False) -> Group:
        """Make the run directory and the control groups of a sandbox, and return its own group.

        The OCI runtime sets the limits of that group. While the group exists, no other process removes its parents.
        """
        self._layout.make_run(record.sandbox_id)
        self._layout.starting(record.sandbox_id).create(CgroupLimits())
        return self._layout.make_group(record, CgroupLimits(), virtual=virtual)

    def plan(self, record: Record, image: Image | None, argv: tuple[str, ...], network: str | None = None) -> Plan:
        layout = self._layout
        ids = layout.ids.claim(record.sandbox_id)
        materials = self._materials.take(record, image)
        if image is not None and image.root is not None:
            root = materials.root
            root = dataclasses.replace(root, lowers=(layout.top(root.inner), *root.lowers))
            materials = dataclasses.replace(materials, root=root)
        facts = HostFacts(
            platform.machine(),
            os.cpu_count() or 1,
            hide_unified_cgroup=self._name == "crun" and layout.hierarchy.mode == "hybrid",
        )
        return dataclasses.replace(plan_for(layout, record, materials, facts, ids, argv), network_path=network)

    def write_bundle(self, plan: Plan, render: Render) -> None:
        group = self._layout.group(plan.sandbox_id)
        bundle = render(plan, self._layout.stage(self.runtime().program), group.path)
        path = self._layout.run(plan.sandbox_id) / "config.json"
        path.write_text(json.dumps(bundle, separators=(",", ":")))

    async def supervisor(
        self, plan: Plan, deadline: Deadline, opened: ExitStack, *, virtual_kernel: bool = False
    ) -> int:
        # OCI runtimes refuse a control group that has processes, so the supervisor enters the sandbox's afterwards.
        group = self._layout.group(plan.sandbox_id)
        own = dict.fromkeys(group.directory(name) for name in group.hierarchy.controllers)
        return await supervisor(
            self._layout.mounter(),
            self._starting_lists(plan),
            deadline,
            opened,
            lasting=[directory / "cgroup.procs" for directory in own if directory is not None],
            virtual_kernel=virtual_kernel,
        )

    def _starting_lists(self, plan: Plan) -> list[Path]:
        return [directory / "cgroup.procs" for directory in self._layout.starting(plan.sandbox_id).directories()]

    # --- the call ----------------------------------------------------------------------------------------------------

    async def run(
        self,
        plan: Plan,
        runtime: Runtime,
        fds: Sequence[int],
        deadline: Deadline,
        opened: ExitStack,
        *,
        guard: tuple[int, int] | None = None,
        stdio: tuple[int, int, int] | None = None,
        memory: Path | None = None,
    ) -> ProcessRef:
        """Run `atoll-mount`, which then becomes the OCI runtime, and return the sandbox's first process.

        With `memory`, the processes continue that were saved in that directory.
        """
        staged = self._layout.stage(runtime.program)
        operations = launcher_protocol.runtime_operations(plan, staged, self._starting_lists(plan), guard)
        all_fds = [*fds, memory_file(operations, opened)]
        command = self._command(plan, runtime, FIRST_FD + len(fds), memory)
        finished = await run_program.run(command, all_fds, deadline, stdio=stdio, report=True, what=runtime.name)
        return self._started(plan, runtime, finished)

    def _command(self, plan: Plan, runtime: Runtime, list_fd: int, memory: Path | None) -> list[str]:
        """Return the command line of `atoll-mount`: the descriptor of its operations (the last one), the descriptor for
        its report, and the command line of the OCI runtime."""
        run = self._layout.run(plan.sandbox_id)
        words = ["run"] if memory is None else ["restore", "--image-path", str(memory)]
        words += ["--detach", "--bundle", str(run), "--pid-file", str(run / "pid")]
        if list_fd > FIRST_FD and not runtime.virtual_kernel:
            words += ["--preserve-fds", str(list_fd - FIRST_FD)]
        command = runtime.command(run / "runtime", *words, plan.sandbox_id, log=run / "log")
        return [str(self._layout.mounter()), "prepare", str(list_fd), str(list_fd + 1), "--", *command]

    def _started(self, plan: Plan, runtime: Runtime, finished: run_program.Finished) -> ProcessRef:
        run = self._layout.run(plan.sandbox_id)
        if finished.status != 0:
            raise _failure(plan, runtime, finished, run / "log")
        init = _process_in(run / "pid")
        # Whatever a broken OCI runtime reports, a process outside the sandbox's control group is not the sandbox's.
        if init is None or not init.is_alive() or init.pid not in self._layout.group(plan.sandbox_id).pids():
            raise EngineError(f"{runtime.name} reported success, but the sandbox has no process")
        return init

    def settle(self, sandbox_id: str) -> None:
        """Remove the OCI runtime's own control group once the sandbox runs. If the OCI runtime left processes in it,
        the group stays until the sandbox is deleted."""
        with suppress(OSError):
            self._layout.starting(sandbox_id).remove()
        for directory in self._layout.group(sandbox_id).directories():
            with suppress(OSError):  # OCI runtimes let all users list the directory, which shows the sandboxes
                if directory.parent.stat().st_mode & 0o044:
                    directory.parent.chmod(0o711)

    async def ask(self, sandbox_id: str, what: str, *more: str, deadline: Deadline) -> None:
        """Execute a command of the OCI runtime, such as `pause`, on a running sandbox. Raises EngineError if it
        fails."""
        runtime, run = self.runtime(), self._layout.run(sandbox_id)
        command = runtime.command(run / "runtime", what, *more, sandbox_id, log=run / f"log-{what}")
        finished = await run_program.run(command, (), deadline, what=f"{runtime.name} {what}")
        if finished.status != 0:
            said = oci_runtimes.last_error(run / f"log-{what}")
            if what == "resume" and "running" in said:  # it was not paused
                return
            raise EngineError(f"{runtime.name} could not {what} the sandbox: {said or finished.status}")


def _failure(plan: Plan, runtime: Runtime, finished: run_program.Finished, log: Path) -> Exception:
    failed = launcher_protocol.failure(finished.said)
    if failed is not None and failed.step == "put":
        for mount in plan.mounts:
            if isinstance(mount, Bind) and mount.target == failed.detail:
                return SpecError(f"a volume cannot be mounted on '{mount.target}': {failed.reason}")
    if finished.said:
        kind = ImageError if failed is not None and failed.is_of_the_image else EngineError
        return kind(f"the sandbox's file tree could not be made: {failed or finished.said}")
    how = f"killed by signal {-finished.status}" if finished.status < 0 else f"ended with status {finished.status}"
    said = oci_runtimes.last_error(log)
    return EngineError(
        f"{runtime.name} {how}{': ' + said if said else ''}",
        hint="'atoll doctor' checks what is needed on this machine.",
    )


@functools.lru_cache(4)
def seccomp_filter(profile: Profile, machine: str) -> bytes:
    return bpf.assemble(profile, machine)


def _process_in(path: Path) -> ProcessRef | None:
    try:
        text = path.read_bytes()[:20].strip()
        return ProcessRef.of(int(text)) if text.isdigit() else None
    except OSError:
        return None


def memory_file(content: bytes, opened: ExitStack) -> int:
    fd = os.memfd_create("operations", os.MFD_CLOEXEC)
    opened.callback(os.close, fd)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
