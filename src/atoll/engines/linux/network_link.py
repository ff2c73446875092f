"""The link of a sandbox to the gateway: made before its network stack reads it, or right after its first process is
there, and in either case before anybody can run anything in it."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux.record import Record
from atoll.errors import SandboxGoneError
from atoll.network.client import Gateway
from atoll.network.link import netlink


def prepared(gateway: Gateway, record: Record, opened: ExitStack) -> str:
    """A new network namespace with a link in it, by a path that is good as long as `opened` is."""
    fd = netlink.new_network()
    opened.callback(os.close, fd)
    with netlink.inside(fd), netlink.Links() as links:
        links.up(socket.if_nametoindex("lo"))  # the runtime makes the sandbox's own from it
    gateway.attach(record.sandbox_id, record.spec.network, fd)
    return f"/proc/{os.getpid()}/fd/{fd}"


def network_of(pid: int) -> int | None:
    """What tells its network namespace from others."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def attach_early(gateway: Gateway, record: Record, launcher: int) -> int | None:
    """To the network namespace of a launcher, a child of ours that waits to become a sandbox. Says which one that was;
    None if it has none of its own yet, or has ended."""
    try:
        fd = os.open(f"/proc/{launcher}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd).st_ino
        if found == network_of(os.getpid()):
            return None
        gateway.attach(record.sandbox_id, record.spec.network, fd)
        return found
    finally:
        os.close(fd)


def attach(gateway: Gateway, record: Record, init: ProcessRef) -> None:
    """To the network namespace of its first process."""
    try:
        fd = os.open(f"/proc/{init.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SandboxGoneError("the sandbox ended while it was being connected") from None
    try:
        # Only now is it certain that the number was still that process's.
        if not init.is_alive():
            raise SandboxGoneError("the sandbox ended while it was being connected")
        gateway.attach(record.sandbox_id, record.spec.network, fd)
    finally:
        os.close(fd)
