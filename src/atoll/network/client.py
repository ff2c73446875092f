"""The engines' interface to the gateway. The gateway is started when it is first needed, and again if it has ended."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter

from atoll.errors import EngineError, EngineUnavailableError, UnsupportedError
from atoll.model.network_policy import NetworkPolicy, opens_tls
from atoll.network.authority import Authority
from atoll.network.gateway_files import GatewayFiles
from atoll.network.link import router
from atoll.network.refusals import Refusal, forget_refusals, read_refusals
from atoll.settings import Settings

if TYPE_CHECKING:
    from atoll.network.gateway.member import MemberRecord

_ANSWER_S = 10.0
_START_S = 20.0
_TRIES = 4
_POLICY: TypeAdapter[NetworkPolicy] = TypeAdapter(NetworkPolicy, config=ConfigDict(defer_build=True))

NAME_SERVER = str(router.RESOLVER)
LINK = router.LINK
RESOLV_CONF = f"nameserver {NAME_SERVER}\noptions timeout:5 attempts:2\n"
"""The content of `/etc/resolv.conf` in every sandbox. Without a link the name server is not reachable, so lookups fail
at once."""


@functools.cache
def problem() -> str | None:
    """Return why policies cannot be enforced on this machine, or None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux"
    if router.nft() is None:
        return "nft is not installed; run 'apt-get install nftables'"
    return None


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway of an installation. All methods block for milliseconds, or for as long as Python takes to start if
    the gateway has to be started."""

    settings: Settings

    @property
    def files(self) -> GatewayFiles:
        return GatewayFiles(self.settings.run_dir / "network")

    def attach(self, sandbox_id: str, policy: NetworkPolicy, network: int) -> None:
        """Make a link with this policy for a sandbox. `network` is a descriptor of its network namespace."""
        self._ask({"do": "attach", "id": sandbox_id, "policy": _plain(policy)}, (network,))

    def change(self, sandbox_id: str, policy: NetworkPolicy) -> bool:
        """Replace the policy of a sandbox. Returns False if it has no link."""
        if not self.files.is_member(sandbox_id):
            return False
        return "unknown" not in self._ask({"do": "change", "id": sandbox_id, "policy": _plain(policy)})

    def detach(self, sandbox_id: str) -> None:
        """Remove a sandbox's link. May be repeated, and is cheap for a sandbox that never had a link."""
        if self.files.is_member(sandbox_id):
            with contextlib.suppress(OSError, EngineError):
                self._ask({"do": "detach", "id": sandbox_id}, start=False)
            self.files.member(sandbox_id).unlink(missing_ok=True)

    def forget(self, sandbox_id: str) -> None:
        """Remove the network log and the certificate authority of a sandbox."""
        forget_refusals(self.files.log(sandbox_id))
        self.files.authority(sandbox_id).unlink(missing_ok=True)

    def refusals(self, sandbox_id: str) -> Sequence[Refusal]:
        return read_refusals(self.files.log(sandbox_id))

    def authority(self, sandbox_id: str) -> Authority:
        """Return the sandbox's certificate authority, made on first use. Raises UnsupportedError."""
        self.settings.engine_run_dir("authorities")
        return Authority.at(self.files.authority(sandbox_id))

    def need_authority(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """Raise UnsupportedError if the policy needs a certificate authority and the sandbox has none, because only a
        new sandbox can be made to trust one."""
        if opens_tls(policy) and not self.files.authority(sandbox_id).exists():
            raise UnsupportedError(
                "this sandbox trusts no authority of its own, so headers cannot be added to its HTTPS requests",
                hint="Make it with a policy that adds headers with 'tls'; they can be changed later.",
            )

    def policy(self, sandbox_id: str) -> NetworkPolicy | None:
        """Return the current policy of a sandbox, or None if it has no link."""
        record = self.record(sandbox_id)
        return None if record is None else record.policy

    def record(self, sandbox_id: str) -> MemberRecord | None:
        """Return the gateway's record of a sandbox, or None if it has no link."""
        from atoll.network.gateway.member import MemberRecord  # a part of the gateway, which few sandboxes use

        try:
            return MemberRecord.model_validate_json(self.files.member(sandbox_id).read_bytes())
        except (OSError, ValueError):
            return None

    def ensure(self) -> None:
        """Start the gateway if there is a router but no gateway. Sandboxes that an earlier process made may need it."""
        if self.files.is_router_there() and not _is_locked(self.files.lock):
            self._start()

    def collect(self) -> bool:
        """End the gateway if it serves no sandbox, and remove what a killed gateway left behind. Return whether there
        was a router to remove."""
        files = self.files
        if not files.directory.is_dir():
            return False
        with contextlib.suppress(OSError, EngineError):
            if self._ask({"do": "leave"}, start=False)["members"]:
                return False
        deadline = time.monotonic() + _ANSWER_S
        while _is_locked(files.lock) and time.monotonic() < deadline:
            time.sleep(0.005)
        if _is_locked(files.lock) or any(files.members.glob("*.json")):
            return False
        found = files.is_router_there()
        router.remove_router(files.router)
        claims = files.link_claims()
        for slot, sandbox_id in claims.own().items():
            claims.release(slot, sandbox_id)
        claims.collect(lambda slot: False)  # addresses of a router that is gone are unused
        shutil.rmtree(files.directory, ignore_errors=True)
        return found

    # --- its parts -------------------------------------------------------------------------------------------------

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = (), *, start: bool = True) -> dict[str, Any]:
        content = json.dumps(request).encode()
        for tries_left in range(_TRIES - 1, -1, -1):
            try:
                answer = self._exchange(content, fds)
                break
            except (FileNotFoundError, ConnectionError) as error:
                if not start:
                    raise EngineError("the network gateway is not running") from error
                if not tries_left:
                    raise EngineError(f"the network gateway does not answer: {error}") from error
                self._start()
            except TimeoutError:
                raise EngineError("the network gateway did not answer in time") from None
        if "error" in answer:
            raise EngineError(f"the network gateway failed: {answer['error']}")
        return answer

    def _exchange(self, content: bytes, fds: Sequence[int]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(str(self.files.control))
            socket.send_fds(connection, [content], list(fds))
            data = connection.recv(65_536)
        if not data:
            raise ConnectionResetError("it ended")
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _start(self) -> None:
        if (reason := problem()) is not None:
            raise EngineUnavailableError(f"network policies cannot be enforced: {reason}")
        self.settings.engine_run_dir("network")
        files = self.files
        self.settings.socket_path("network", "control")
        with open(files.starting, "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                    probe.connect(str(files.control))
                    return  # another process was faster
            _run(files)


def _run(files: GatewayFiles) -> None:
    with open(files.messages, "ab") as messages:
        started = subprocess.Popen(
            [sys.executable, "-m", "atoll.network.gateway.process", str(files.directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            start_new_session=True,
            cwd="/",
        )
    assert started.stdout is not None
    with started.stdout as said:
        ready = select.select([said], [], [], _START_S)[0] and said.readline() == b"ready\n"
    if not ready:
        started.kill()
        started.wait()
        lines = files.messages.read_text(errors="replace").strip().splitlines()
        raise EngineError(f"the network gateway did not start: {lines[-1] if lines else 'it reported no error'}")
    started.returncode = 0  # it outlives this process, so tell Popen not to wait for it


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _plain(policy: NetworkPolicy) -> Any:
    return _POLICY.dump_python(policy, mode="json")
