"""Making a sandbox: from its record to an agent that answers. Whatever fails, all that was made is found by its
name."""

from __future__ import annotations

import functools
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from atoll import workers
from atoll.engines.linux import bpf, host_copies, host_view
from atoll.engines.linux.cgroups import Group
from atoll.engines.linux.native import words
from atoll.engines.linux.native.launcher import Launchers
from atoll.engines.linux.native.ordinary import UserNamespace
from atoll.engines.linux.oci import checkpoints
from atoll.engines.linux.oci.building import Builder, check_volumes
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.record import Record
from atoll.engines.linux.oci.runtimes import Runtime
from atoll.engines.linux.oci.supervising import supervisor
from atoll.engines.linux.plan import HostFacts, Plan, Root, for_ordinary_user, make_plan
from atoll.engines.linux.seccomp import Profile, SetId, profile
from atoll.engines.local import sockets
from atoll.engines.local.waiting import Deadline, finish
from atoll.errors import EngineError
from atoll.images import Image

_LISTENER_FD = "3"
_FRESH_S = 2.0
"""How long a look at the host's /etc and at the agent's file is good for."""


class NativeBuilder(Builder):
    def __init__(self, places: Places, runtime: Runtime, namespace: UserNamespace | None) -> None:
        """`namespace`: that in which an ordinary user is root."""
        super().__init__(places)
        self._namespace = namespace
        self.runtime = runtime
        self._launchers = Launchers()
        self._program = str(runtime.program)
        self._run_dir: Path | None = None
        self._looked_at = -_FRESH_S
        self._host: Path
        self._copies: dict[int, Path] = {}
        self._agent: Path

    async def make(
        self, record: Record, started: Callable[[int], bool], deadline: Deadline, begun: Callable[[int], None]
    ) -> None:
        """`begun` is called with a launcher that may become it, and whose network namespace then is its own. `started`
        is called with its first process, which has been told all that it needs to become the agent; it says whether
        there still is one."""
        check_volumes(record.spec)
        image = await checkpoints.acquire(self._places, record)
        with ExitStack() as opened:
            taken = self._launchers.take(self._program)
            undo = opened.enter_context(ExitStack())
            if taken is not None:
                undo.callback(self._launchers.put_away, taken)
                begun(taken.pid)
            plan, joining = await finish(workers.run(workers.ENGINE, self._prepare, record, image))
            undo.pop_all()
            chosen = self._launchers.fitting(taken, self._program, words.early(plan, joining))
            opened.callback(self._launchers.put_away, chosen)
            listener = opened.enter_context(sockets.listen(self._places.socket(record.sandbox_id)))
            agent = os.open(self._agent, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, agent)
            lists = (*words.operations(plan, joining), _filter(plan.seccomp, plan.machine))
            known = False
            if not self._places.hierarchy.controllers and (first := await chosen.wait_for_first(deadline)) is not None:
                # In no control group, it is found by its number alone: written down before it is told to go on.
                known = started(first)
            fds = [listener.fileno(), agent]
            if plan.is_supervised:
                program = self._places.mounter()
                groups = joining.lists if joining.born_in is None else (joining.born_in / "cgroup.procs",)
                fds.append(await supervisor(program, groups, deadline, opened))
            chosen.tell(lists, fds, deadline)
            # The agent finds a caller waiting as soon as it looks.
            caller = opened.enter_context(await _call(self._places.socket(record.sandbox_id), deadline))
            listener.close()  # it is the agent's alone: if there is none, the caller hears of it
            # There is time to write it down while the rest is made.
            known = known or ((first := chosen.first()) is not None and started(first))
            first = await chosen.outcome(caller, deadline)
            if not known and not started(first):
                raise EngineError("the sandbox ended while it was being made")
        self._launchers.prepare_soon(self._program)

    def rest(self) -> None:
        """A sandbox is gone and nobody waits: the moment to prepare for the next."""
        self._launchers.prepare_now(self._program)

    def close(self) -> None:
        self._launchers.close()
        if self._namespace is not None:
            self._namespace.close()

    def _prepare(self, record: Record, image: Image | None) -> tuple[Plan, words.Joining]:
        """Claim what the sandbox needs. In a thread: the file system of the layers may be busy."""
        places, sandbox_id = self._places, record.sandbox_id
        self._look()
        self._make_run(sandbox_id)
        ids = places.ids.claim(sandbox_id) if self._namespace is None else self._namespace.ids
        below = self._host / host_view.INNER if image is None or image.root is None else image.root
        layer = checkpoints.layer_for(places, record, below)
        if image is None or image.root is None:
            copies = self._copies_for(record.account or "")
            root = Root((self._host,), layer.path, host_view.INNER, host_view.USR, copies)
            env = {}
        else:
            root = Root((image.root.parent,), layer.path, image.root.name)
            env = image.config.env
        # All users of this machine may read it, so it does not name the sandbox.
        argv = ("atoll-agent", "--listen-fd", _LISTENER_FD, "--work-dir", record.spec.work_dir)
        files = places.network_files(sandbox_id, record.spec, root)
        env = {**env, **places.network_variables(record.spec)}
        plan = make_plan(
            record.limited_spec(), _facts(), root, ids, sandbox_id=sandbox_id, argv=argv, env=env, files=files
        )
        if self._namespace is not None:
            plan = for_ordinary_user(plan)
            self._launchers.fds = (self._namespace.open(),)
        return plan, self._joining(places.make_group(record, plan.cgroup))

    def _look(self) -> None:
        """At what many sandboxes share, and not for each of them."""
        now = time.monotonic()
        if now - self._looked_at < _FRESH_S and self._host.is_dir():
            return
        self._host = host_view.skeleton(self._places.data / "host")
        self._copies.clear()
        self._agent = self._places.agent()
        self._looked_at = now

    def _copies_for(self, account: str) -> Path:
        number = host_copies.number_of(account)
        if number not in self._copies:
            self._copies[number] = host_copies.copies(self._places.data / "host-copies", number, host_view.USR)
        return self._copies[number]

    def _make_run(self, sandbox_id: str) -> None:
        if self._run_dir is None:
            self._run_dir = self._places.make_run(sandbox_id).parent
            return
        self._places.settings.socket_path("oci", f"{sandbox_id}/s")
        os.mkdir(self._run_dir / sandbox_id, 0o700)

    def _joining(self, group: Group) -> words.Joining:
        if group.hierarchy.mode == "v2":
            return words.Joining(born_in=group.directory("freezer"))
        # A single thread that moves itself needs no lock of the whole machine, which `cgroup.procs` would take.
        directories = dict.fromkeys(group.directory(name) for name in group.hierarchy.controllers)
        lists = tuple(directory / "tasks" for directory in directories if directory is not None)
        return words.Joining(lists, devices=group.directory("devices"))


async def _call(path: Path, deadline: Deadline) -> socket.socket:
    caller = await sockets.connect(path, deadline)
    sockets.hang_up(caller)
    return caller


@functools.cache
def _facts() -> HostFacts:
    return HostFacts(platform.machine(), os.cpu_count() or 1)


def _filter(wanted: Profile, machine: str) -> bytes:
    # To compare profiles takes longer than all that is saved, so only these are remembered.
    if wanted is profile("allowed"):
        return _known_filter("allowed", machine)
    return _known_filter("supervised", machine) if wanted is profile("supervised") else bpf.assemble(wanted, machine)


@functools.cache
def _known_filter(set_id: SetId, machine: str) -> bytes:
    return bpf.assemble(profile(set_id), machine)
