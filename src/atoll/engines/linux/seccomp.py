"""Which system calls a sandbox may make: one profile as data.

Theory of operation. The profile is an allow-list: what no rule allows fails with EPERM, and a foreign architecture
kills the caller, because a second system call table (i386, x32) is a second attack surface. It refuses all that
Docker refuses, and besides:

* `chroot`, `name_to_handle_at`, `listmount`, `statmount`: ways to look or step outside that no ordinary program
  needs.
* `ptrace`, `process_vm_*`, `process_mrelease`: one program inside cannot read another's memory.
* `io_setup` and its family, `vmsplice`, `remap_file_pages`, `modify_ldt`, `memfd_secret`: rarely used and rich in
  past kernel bugs. They answer ENOSYS, so that programs take their usual way around.
* `sync`, `syncfs`: one sandbox must not make the whole machine flush its disks.
* `adjtimex`, `sched_setscheduler`, `sched_setattr`: nothing a guest should ask of the host's clock or scheduler.
* `mknod` of devices; sockets other than UNIX, IPv4, IPv6 (streams and datagrams) and routing netlink, so AF_ALG,
  AF_VSOCK, AF_PACKET and whatever comes next are closed; the two terminal ioctls that inject input (TIOCSTI,
  TIOCLINUX).

Arguments are compared in their lower 32 bits where the kernel reads an `int`, so nothing is passed by setting a high
bit. `clone3` hides its flags behind a pointer that no filter can read: it answers ENOSYS and the C library falls
back to `clone`, whose flags are checked for new namespaces.
"""

from __future__ import annotations

import errno
import functools
import stat
from dataclasses import dataclass

from atoll.engines.linux import syscalls

LOW32 = 0xFFFF_FFFF
NEW_NAMESPACES = 0x7E02_0000
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET."""

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE, NETLINK_AUDIT = 0, 9
SOCK_STREAM, SOCK_DGRAM, SOCK_TYPE_MASK = 1, 2, 0xF
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
PERSONALITIES = (0x0, 0x8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF)
"""Linux, 32-bit addresses, and `uname` as 2.6: what Docker allows. None of them weakens anything."""


@dataclass(frozen=True, slots=True)
class Match:
    """An argument, cut down to `mask`, equals `value`."""

    index: int
    value: int
    mask: int = LOW32


@dataclass(frozen=True, slots=True)
class Rule:
    """The calls by these names match when all of `matches` hold. `error` None allows, a number is the errno."""

    names: tuple[str, ...]
    matches: tuple[Match, ...] = ()
    error: int | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """Any rule that matches decides; rules of one call never contradict each other. Otherwise `default_error`."""

    rules: tuple[Rule, ...]
    default_error: int = errno.EPERM


def _sockets() -> list[Rule]:
    rules = [
        Rule(("socket",), (Match(0, AF_UNIX),)),
        Rule(("socketpair",), (Match(0, AF_UNIX),)),
        Rule(("socket",), (Match(0, AF_NETLINK), Match(2, NETLINK_ROUTE))),
        # `su` and `login` ask for the audit log, and go on only if there is none.
        Rule(("socket",), (Match(0, AF_NETLINK), Match(2, NETLINK_AUDIT)), error=errno.EPROTONOSUPPORT),
    ]
    for family in (AF_INET, AF_INET6):
        rules += [
            Rule(("socket",), (Match(0, family), Match(1, kind, SOCK_TYPE_MASK))) for kind in (SOCK_STREAM, SOCK_DGRAM)
        ]
    return rules


def _device_free_mknod() -> list[Rule]:
    kinds = (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK)
    return [
        Rule((name,), (Match(index, kind, stat.S_IFMT(0o177777)),))
        for name, index in (("mknod", 1), ("mknodat", 2))
        for kind in kinds
    ]


def _ioctls_but(*refused: int) -> list[Rule]:
    """Every request number but these, which share all bits above the lowest four.

    A filter can only say "equals under a mask", so the complement is spelled out: a request differs in one of the
    upper 28 bits, or is one of the others in the same block of sixteen.
    """
    block = {number >> 4 for number in refused}
    assert len(block) == 1, "the refused requests lie in one block of sixteen"
    base = block.pop() << 4
    rules = [Rule(("ioctl",), (Match(1, ~base & 1 << bit, 1 << bit),)) for bit in range(4, 32)]
    return rules + [Rule(("ioctl",), (Match(1, base + low),)) for low in range(16) if base + low not in refused]


@functools.cache
def default_profile() -> Profile:
    refused = tuple(sorted(syscalls.ANSWER_NOT_IMPLEMENTED))
    return Profile(
        (
            Rule(tuple(sorted(syscalls.ALLOWED))),
            Rule(refused, error=errno.ENOSYS),
            Rule(("clone",), (Match(0, 0, NEW_NAMESPACES),)),
            *(Rule(("personality",), (Match(0, value),)) for value in PERSONALITIES),
            *_sockets(),
            *_device_free_mknod(),
            *_ioctls_but(TIOCSTI, TIOCLINUX),
        )
    )
