"""Makes the link of a sandbox to the gateway, either before its network stack reads its links or right after its first
process exists. In both cases no command can run in the sandbox before."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux.linux_record import Record
from atoll.errors import SandboxGoneError
from atoll.network.client import Gateway
from atoll.network.link import netlink


def prepared(gateway: Gateway, record: Record, opened: ExitStack) -> str:
    """Make a new network namespace with a link in it. The returned path is valid until `opened` is closed."""
    fd = netlink.new_network()
    opened.callback(os.close, fd)
    with netlink.inside(fd), netlink.Links() as links:
        links.up(socket.if_nametoindex("lo"))  # gVisor copies it to the sandbox's own network stack
    gateway.attach(record.sandbox_id, record.spec.network, fd)
    return f"/proc/{os.getpid()}/fd/{fd}"


def network_of(pid: int) -> int | None:
    """Return the inode number that identifies a process's network namespace, or None if the process has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def attach_early(gateway: Gateway, record: Record, launcher: int) -> int | None:
    """Make the link in the network namespace of a launcher, a child process that waits to become a sandbox.

    Returns the inode number of the namespace, or None if the launcher has none of its own yet or has ended.
    """
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
    """Make the link in the network namespace of the sandbox's first process. Raises SandboxGoneError if it has
    ended."""
    try:
        fd = os.open(f"/proc/{init.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SandboxGoneError("the sandbox ended while it was being connected") from None
    try:
        # Only now is it certain that the id still belonged to that process when the namespace was opened.
        if not init.is_alive():
            raise SandboxGoneError("the sandbox ended while it was being connected")
        gateway.attach(record.sandbox_id, record.spec.network, fd)
    finally:
        os.close(fd)
