"""The gateway: one process for each installation that carries or refuses the traffic of its sandboxes.

Theory of operation. `python -m atoll.network.gateway.process DIRECTORY` makes the router (see `link/router.py`) and its
sockets, and then starts a worker that does everything else. The worker runs in the network namespace through which
connections leave (the host's, or the one that ATOLL_NETWORK_UPLINK names), and accepts connections from sockets that
were opened in the router. There is no other way between the two namespaces, so nothing gets through while there is no
worker. The parent only waits for the worker's end and starts another one, which reads the members from files. When the
last sandbox has gone, both end and remove the router.

The sandbox that sent a packet is known from its source address, which the kernel ties to the sandbox's own link.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from atoll.network.gateway.bandwidth_share import DEFAULT_BYTES_PER_S
from atoll.network.gateway.datagrams import Datagrams, receive
from atoll.network.gateway.member import MAX_CONNECTIONS, Member, MemberRecord, Members
from atoll.network.gateway.proxy import Proxy
from atoll.network.gateway.refused_attempts import RefusedAttempts
from atoll.network.gateway.relay import reset, settle
from atoll.network.gateway.resolver import Resolver, servers_of
from atoll.network.gateway_files import GatewayFiles
from atoll.network.link import netlink, router
from atoll.network.link.gate import Gate
from atoll.network.link.netlink import Links
from atoll.network.link.router import Listeners

_LINGER_S = 5.0
_MAX_REQUEST = 256 * 1024
_MAX_RESTART_PAUSE_S = 2.0
_PR_SET_PDEATHSIG = 1
_NICE = -10
_MAX_PENDING = 2 * MAX_CONNECTIONS
"""The maximum number of connections and DNS questions of one sandbox that are being served."""


class Worker:
    def __init__(
        self,
        files: GatewayFiles,
        router_fd: int,
        listeners: Listeners,
        control: socket.socket,
        resolver: Resolver,
        most_bytes_per_s: float = DEFAULT_BYTES_PER_S,
    ) -> None:
        self._files, self._router, self._listeners, self._control = files, router_fd, listeners, control
        self._members = Members(files, most_bytes_per_s)
        self._claims = files.link_claims()
        self._resolver = resolver
        self._proxy = Proxy(resolver)
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_slot = 1
        self._empty_since = time.monotonic()
        self._over = asyncio.Event()
        self._turn = asyncio.Lock()
        self._gate = Gate(router_fd)
        with netlink.inside(router_fd):
            self._links = Links()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._members.load()
        self._settle_claims()
        self._next_slot = max(self._members.by_slot, default=0) + 1
        await self._gate.restore({slot: member.policy for slot, member in self._members.by_slot.items()})
        if self._gate.is_there:
            self._refused_attempts = RefusedAttempts(self._router, self._find)
        self._datagrams = Datagrams(self._router, self._listeners.udp, self._find)
        loop.add_reader(self._listeners.tcp.fileno(), self._accepted, self._listeners.tcp)
        loop.add_reader(self._listeners.dns_tcp.fileno(), self._accepted, self._listeners.dns_tcp)
        loop.add_reader(self._listeners.dns_udp.fileno(), self._asked)
        loop.add_reader(self._control.fileno(), self._called)
        looking = asyncio.create_task(self._look())
        await self._over.wait()
        looking.cancel()

    # --- traffic ---------------------------------------------------------------------------------------------------

    def _find(self, address: str) -> Member | None:
        return self._members.by_slot.get(router.slot_of(IPv4Address(address)))

    def _accepted(self, listener: socket.socket) -> None:
        for _ in range(64):
            try:
                connection, source = listener.accept()
            except OSError as error:
                if not isinstance(error, BlockingIOError):  # no descriptors left; connections wait in the queue
                    self._pause(listener)
                return
            connection.setblocking(False)
            member = self._find(source[0])
            if member is None or member.pending >= _MAX_PENDING:
                reset(connection)
                continue
            member.pending += 1
            if listener is self._listeners.dns_tcp:
                work = self._resolver.serve_stream(member, connection)
            else:
                work = self._proxy.serve(member, connection, connection.getsockname())
            self._start(_counted(member, work))

    def _pause(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())
        loop.call_later(0.1, loop.add_reader, listener.fileno(), self._accepted, listener)

    def _asked(self) -> None:
        for _ in range(64):
            try:
                message, source, target = receive(self._listeners.dns_udp)
            except OSError:
                return
            member = self._find(source[0])
            if member is not None and target is not None and member.pending < _MAX_PENDING:
                member.pending += 1
                self._start(_counted(member, self._answer(member, message, source, target)))

    async def _answer(self, member: Member, message: bytes, source: tuple[str, int], target: tuple[str, int]) -> None:
        answer = await self._resolver.answer(member, message, source)
        if answer is not None:
            with contextlib.suppress(OSError):
                with router.transparent_socket(self._router, socket.SOCK_DGRAM, target) as speaker:
                    speaker.sendto(answer, source)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            print(f"gateway: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    # --- requests of engines ---------------------------------------------------------------------------------------

    def _called(self) -> None:
        with contextlib.suppress(OSError):
            caller, _ = self._control.accept()
            caller.setblocking(False)
            self._start(self._serve(caller))

    async def _serve(self, caller: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with caller:
            ready = loop.create_future()
            loop.add_reader(caller.fileno(), settle, ready)
            try:
                async with asyncio.timeout(10):
                    await ready
            except TimeoutError:
                return
            finally:
                loop.remove_reader(caller.fileno())
            data, fds = _receive_with_fds(caller)
            try:
                async with self._turn:
                    answer = await self._execute(json.loads(data), fds)
            except Exception as error:  # report it to the caller, and go on
                answer = {"error": f"{type(error).__name__}: {error}"}
            finally:
                for fd in fds:
                    os.close(fd)
            with contextlib.suppress(OSError):
                caller.send(json.dumps(answer).encode())

    async def _execute(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        match request["do"]:
            case "attach":
                return await self._attach(request["id"], request["policy"], fds[0])
            case "change":
                return await self._change(request["id"], request["policy"])
            case "detach":
                self._detach(request["id"])
                return {}
            case "leave":
                self._leave()
                return {"members": len(self._members.by_id)}
            case other:
                raise ValueError(f"unknown request {other!r}")

    async def _attach(self, sandbox_id: str, policy: Any, network: int) -> dict[str, Any]:
        self._detach(sandbox_id)
        slot = self._free_slot(sandbox_id)
        record = MemberRecord(sandbox_id=sandbox_id, slot=slot, policy=policy, network=os.fstat(network).st_ino)
        # The policy is in force before the first packet can arrive.
        self._members.add(record)
        try:
            await self._gate.admit(slot, record.policy)
            router.connect(self._links, self._router, network, slot)
        except BaseException:
            self._forget(sandbox_id)
            raise
        return {"address": str(router.addresses(slot)[1])}

    def _free_slot(self, sandbox_id: str) -> int:
        """Claim a slot that no other installation on this machine uses. Slots are reused as late as possible."""
        for _ in router.SLOTS:
            slot = self._next_slot if self._next_slot in router.SLOTS else 1
            self._next_slot = slot + 1
            if slot in self._members.by_slot or self._has_link(slot):
                continue
            if self._claims.take(str(slot), sandbox_id):
                return slot
        raise RuntimeError("there are no addresses left")

    def _has_link(self, slot: int) -> bool:
        with netlink.inside(self._router):
            try:
                socket.if_nametoindex(router.link_name(slot))
            except OSError:
                return False
            return True

    async def _change(self, sandbox_id: str, policy: Any) -> dict[str, Any]:
        member = self._members.by_id.get(sandbox_id)
        if member is None:
            return {"unknown": True}
        record = MemberRecord(sandbox_id=sandbox_id, slot=member.slot, policy=policy, network=member.network)
        await self._gate.admit(member.slot, record.policy)
        self._members.write(record)
        member.change(record.policy)
        return {}

    def _settle_claims(self) -> None:
        """Claim the slots of all members, and release all others of this installation."""
        for member in self._members.by_id.values():
            self._claims.take(str(member.slot), member.sandbox_id)
        for slot, sandbox_id in self._claims.own().items():
            if int(slot) not in self._members.by_slot:
                self._claims.release(slot, sandbox_id)

    def _detach(self, sandbox_id: str) -> None:
        self._forget(sandbox_id)
        self._empty_since = time.monotonic()

    def _forget(self, sandbox_id: str) -> None:
        member = self._members.remove(sandbox_id)
        if member is not None:
            self._gate.forget(member.slot)
            self._claims.release(str(member.slot), sandbox_id)

    async def _look(self) -> None:
        """Forget members whose link has vanished with their sandbox, and end the gateway after the last one."""
        while True:
            await asyncio.sleep(_LINGER_S)
            async with self._turn:  # a member that is being attached has no link yet
                for member in list(self._members.by_id.values()):
                    if not self._has_link(member.slot):
                        self._forget(member.sandbox_id)
                        self._empty_since = time.monotonic()
                await self._gate.collect()
            if time.monotonic() - self._empty_since >= _LINGER_S:
                self._leave()

    def _leave(self) -> None:
        if not self._members.by_id:
            self._files.control.unlink(missing_ok=True)
            self._over.set()


async def _counted(member: Member, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    finally:
        member.pending -= 1


def _receive_with_fds(caller: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    data, extras, _, _ = caller.recvmsg(_MAX_REQUEST, socket.CMSG_SPACE(4))
    for level, kind, value in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, list(fds)


# --- the process -----------------------------------------------------------------------------------------------------


def main() -> int:
    files = GatewayFiles(Path(sys.argv[1]))
    _most_bytes_per_s()  # report an invalid value before "ready"
    lock = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # wait until an earlier gateway has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError):  # a higher priority, because all sandboxes depend on the gateway
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    if not files.is_router_there():
        files.forget_members()
    router_fd = router.open_router(files.router)
    listeners = router.listen(router_fd)
    files.control.unlink(missing_ok=True)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    control.bind(str(files.control))
    control.listen(256)
    print("ready", flush=True)
    os.dup2(2, 1)
    pause = 0.02
    while True:
        began = time.monotonic()
        status = _worker_until_it_ends(files, router_fd, listeners, control)
        if status == 0:
            router.remove_router(files.router)
            return 0
        pause = 0.02 if time.monotonic() - began > 10 else min(2 * pause, _MAX_RESTART_PAUSE_S)
        time.sleep(pause)


def _worker_until_it_ends(files: GatewayFiles, router_fd: int, listeners: Listeners, control: socket.socket) -> int:
    parent = os.getpid()
    pid = os.fork()  # safe, because this process has never started a thread
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            asyncio.run(_work(files, router_fd, listeners, control))
            status = 0
    except BaseException as error:  # no exception may continue in the parent's code
        print(f"gateway: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


async def _work(files: GatewayFiles, router_fd: int, listeners: Listeners, control: socket.socket) -> None:
    uplink = os.environ.get("ATOLL_NETWORK_UPLINK")
    if uplink:
        fd = os.open(uplink, os.O_RDONLY | os.O_CLOEXEC)
        netlink.setns(fd)
        os.close(fd)
    given = os.environ.get("ATOLL_NETWORK_NAMESERVERS")
    if given:
        servers = [(text.strip(), 53) for text in given.split(",")]
    else:
        servers = servers_of(Path("/etc/resolv.conf").read_text(errors="replace"))
    await Worker(files, router_fd, listeners, control, Resolver(servers), _most_bytes_per_s()).run()


def _most_bytes_per_s() -> float:
    text = os.environ.get("ATOLL_NETWORK_BYTES_PER_S") or str(DEFAULT_BYTES_PER_S)
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1024 <= found <= 1e15:
        raise SystemExit(f"ATOLL_NETWORK_BYTES_PER_S must be a number of at least 1024, not {text!r}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
