"""Makes sandboxes with runc or crun.

`atoll-mount` makes the file tree and then becomes the OCI runtime, which starts the agent with a listening socket of
the host as descriptor 3.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.host import agent_socket
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux import launcher_protocol
from atoll.engines.linux.launcher import Progress, SharedKernelLauncher
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.plan.sandbox_plan import Plan
from atoll.engines.linux.runtimes import oci_bundle
from atoll.engines.linux.runtimes.runtime_call import AGENT, RuntimeCall, memory_file, seccomp_filter
from atoll.errors import AgentUnreachableError, EngineError
from atoll.images import Image
from atoll.waiting import Deadline


class RuntimeLauncher(SharedKernelLauncher):
    """Implements `Launcher` for runc and crun."""

    def __init__(self, layout: SandboxLayout, name: str) -> None:
        super().__init__(layout)
        self.name = name
        self._call = RuntimeCall(layout, name)
        self.handle_details = self._call.handle_details

    def check(self) -> None:
        self._call.runtime()

    async def start(self, record: Record, image: Image | None, progress: Progress, deadline: Deadline) -> ProcessRef:
        call, runtime = self._call, self._call.runtime()
        plan = await finish(workers.run(workers.ENGINE, self._prepare, record, image))
        with ExitStack() as opened:
            listener = opened.enter_context(agent_socket.listen(self._layout.socket(record.sandbox_id)))
            files = (self._layout.mounter(), self._layout.agent())
            fds = [listener.fileno(), *(_open(str(path), opened) for path in files)]
            fds += [memory_file(launcher_protocol.entry_operations(plan), opened)]
            fds += [memory_file(seccomp_filter(plan.seccomp, plan.machine), opened)]
            if plan.is_supervised:
                fds.append(await call.supervisor(plan, deadline, opened))
            init = await call.run(plan, runtime, fds, deadline, opened)
        await self._knock(plan, init, deadline)
        call.settle(record.sandbox_id)
        return init

    def _prepare(self, record: Record, image: Image | None) -> Plan:
        """Claim what the sandbox needs, and write its bundle. Blocks."""
        self._call.make_groups(record)
        argv = (AGENT, "--listen-fd", str(oci_bundle.SOCKET_FD), "--work-dir", record.spec.directory)
        plan = self._call.plan(record, image, argv)
        self._call.write_bundle(plan, oci_bundle.config)
        return plan

    async def _knock(self, plan: Plan, init: ProcessRef, deadline: Deadline) -> None:
        """Wait until the agent serves its socket."""
        pidfd, answered = init.open(), False
        try:
            if pidfd is not None:
                answered = await agent_socket.knock(self._layout.socket(plan.sandbox_id), pidfd, deadline)
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


def _open(path: str, opened: ExitStack) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, fd)
    return fd
