"""The system calls that a sandbox may make: one profile as data.

The profile is an allow-list. A call that no rule allows fails with EPERM. A call from a foreign architecture kills the
caller, because a second system call table (i386, x32) is a second attack surface. The profile refuses all that Docker
refuses, and also:

* `chroot`, `name_to_handle_at`, `listmount`, `statmount`: ways to look or step outside that no ordinary program needs.
* `ptrace`, `process_vm_*`, `process_mrelease`: one program inside cannot read another's memory.
* `io_setup` and its family, `vmsplice`, `remap_file_pages`, `modify_ldt`, `memfd_secret`: rarely used and rich in past
  kernel bugs. They answer ENOSYS, so that programs use their fallbacks.
* `sync`, `syncfs`: one sandbox must not make the whole machine flush its disks.
* `adjtimex`, `sched_setscheduler`, `sched_setattr`: the host's clock and scheduler are not a sandbox's business.
* `mknod` of devices; sockets other than UNIX, IPv4, IPv6 (TCP, UDP and ping) and routing netlink, which excludes
  AF_ALG, AF_VSOCK, AF_PACKET, MPTCP, SCTP and all future families; and the two terminal ioctls that inject input
  (TIOCSTI, TIOCLINUX).

Where the kernel reads an `int`, only the lower 32 bits of an argument are compared, so setting a high bit circumvents
no rule. `clone3` hides its flags behind a pointer that no filter can read. It answers ENOSYS, and the C library falls
back to `clone`, whose flags are checked for new namespaces.

Set-id bits: a set-uid file in a volume is set-uid on the host. So if a sandbox may write to a volume, the calls that
set such a bit are not simply allowed: see `SetId`. `openat2` hides its mode behind a pointer and answers ENOSYS then.
So does Landlock where calls are supervised: a program that dropped rights that way would regain them through the
supervisor, which can take over everything from its caller except that restriction.
"""

from __future__ import annotations

import errno
import functools
import stat
from dataclasses import dataclass
from typing import Literal

from atoll.engines.host.confinement import syscalls

LOW32 = 0xFFFF_FFFF
NEW_NAMESPACES = 0x7E02_0000
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET."""

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE, NETLINK_AUDIT = 0, 9
SOCK_STREAM, SOCK_DGRAM, SOCK_TYPE_MASK = 1, 2, 0xF
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
PERSONALITIES = (0x0, 0x8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF)
"""Linux, 32-bit addresses, and `uname` as 2.6, as Docker allows. None of them weakens anything."""


@dataclass(frozen=True, slots=True)
class Match:
    """A condition: an argument, masked by `mask`, equals `value`."""

    index: int
    value: int
    mask: int = LOW32


@dataclass(frozen=True, slots=True)
class Rule:
    """The calls of these names match if all of `matches` hold. `error` is an errno, or None to allow the call."""

    names: tuple[str, ...]
    matches: tuple[Match, ...] = ()
    error: int | None = None
    supervised: bool = False
    """A supervisor outside makes the call instead of the caller."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A set of rules. Any matching rule decides; rules for one call never contradict each other. `default_error`
    applies to calls that no rule matches."""

    rules: tuple[Rule, ...]
    default_error: int | None = errno.EPERM
    """If None, calls that no rule matches are allowed, also on foreign architectures."""


SetId = Literal["allowed", "contained", "supervised", "refused"]
"""What happens to calls that set the set-uid or set-gid bit of a file. *Allowed*: the sandbox has no volume.
*Contained*: it may write to no volume that others on the host can reach. *Supervised*: they work on the sandbox's own
files, and work without these bits on a volume (`native/launcher/runtime/supervisor.c`). *Refused*: they fail with
EPERM, where the two cannot be told apart."""


def _sockets() -> list[Rule]:
    rules = [
        Rule(("socket",), (Match(0, AF_UNIX),)),
        Rule(("socketpair",), (Match(0, AF_UNIX),)),
        Rule(("socket",), (Match(0, AF_NETLINK), Match(2, NETLINK_ROUTE))),
        # `su` and `login` open the audit log, and continue only if the kernel has none.
        Rule(("socket",), (Match(0, AF_NETLINK), Match(2, NETLINK_AUDIT)), error=errno.EPROTONOSUPPORT),
    ]
    for family in (AF_INET, AF_INET6):
        for kind, protocols in _PROTOCOLS.items():
            matches = (Match(0, family), Match(1, kind, SOCK_TYPE_MASK))
            rules += [Rule(("socket",), (*matches, Match(2, protocol))) for protocol in protocols]
            # Programs that try these first fall back to the ordinary protocol if the kernel does not know them.
            rules += [
                Rule(("socket",), (*matches, Match(2, protocol)), error=errno.EPROTONOSUPPORT)
                for protocol in _FANCY_PROTOCOLS
            ]
    return rules


_TCP, _UDP, _ICMP, _ICMP6 = 6, 17, 1, 58
_PROTOCOLS = {SOCK_STREAM: (0, _TCP), SOCK_DGRAM: (0, _UDP, _ICMP, _ICMP6)}
_FANCY_PROTOCOLS = (33, 132, 136, 256, 262)
"""DCCP, SCTP, UDP-Lite, SMC, MPTCP."""


def _device_free_mknod(set_id: SetId) -> list[Rule]:
    kinds = (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK)
    forbidden = stat.S_IFMT(0o177777) | (0 if set_id in ("allowed", "contained") else SET_ID)
    return [
        Rule((name,), (Match(index, kind, forbidden),))
        for name, index in (("mknod", 1), ("mknodat", 2))
        for kind in kinds
    ]


SET_ID = stat.S_ISUID | stat.S_ISGID
_MODES = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1}
"""The index of the mode among each call's arguments."""
_OPENS = {"open": (1, 2), "openat": (2, 3)}
"""The indices of flags and mode. Without a flag that creates a file, the mode is undefined."""
_O_CREAT, _O_TMPFILE = 0o100, 0o2000_0000
_HIDDEN_MODE = "openat2"
_LANDLOCK = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")


def _set_id_rules(set_id: SetId) -> list[Rule]:
    """Return the rules for every call that takes a mode, with and without set-id bits."""
    rules = [Rule((_HIDDEN_MODE,), error=errno.ENOSYS)]
    rules += [Rule((name,), (Match(mode, 0, SET_ID),)) for name, mode in _MODES.items()]
    for name, (flags, mode) in _OPENS.items():
        rules += [Rule((name,), (Match(flags, 0, _O_CREAT | _O_TMPFILE),)), Rule((name,), (Match(mode, 0, SET_ID),))]
    if set_id == "refused":  # they are refused like everything that no rule allows
        return rules
    for bit in (stat.S_ISUID, stat.S_ISGID):
        rules += [Rule((name,), (Match(mode, bit, bit),), supervised=True) for name, mode in _MODES.items()]
        for name, (flags, mode) in _OPENS.items():
            rules += [
                Rule((name,), (Match(flags, flag, flag), Match(mode, bit, bit)), supervised=True)
                for flag in (_O_CREAT, _O_TMPFILE)
            ]
    return rules


_BTRFS, _TERMINAL = 0x9400, TIOCSTI & 0xFFF0
_TELLING = 0xC000
"""The two bits in which `_BTRFS` and `_TERMINAL` differ."""


def _ioctls_beside_volumes() -> list[Rule]:
    """Allow all requests except TIOCSTI, TIOCLINUX and those of btrfs.

    A directory of btrfs that is mounted directly would allow anybody inside to make subvolumes, which its limit does
    not count and nobody could remove, and to flush the disk of the host. Programs then copy instead of sharing blocks.
    The two bits that tell the two families apart make the rules disjoint.
    """

    def unlike(family: int, bit: int) -> Match:
        """Match what is like a family in the two bits, and differs from it in this bit."""
        return Match(1, family & _TELLING | ~family & 1 << bit, _TELLING | 1 << bit)

    allowed = [
        *(Match(1, value, _TELLING) for value in (0, _TELLING)),
        *(unlike(_BTRFS, bit) for bit in range(8, 14)),
        *(unlike(_TERMINAL, bit) for bit in (*range(4, 14), *range(16, 32))),
        *(Match(1, _TERMINAL + low) for low in range(16) if _TERMINAL + low not in (TIOCSTI, TIOCLINUX)),
    ]
    refused = Rule(("ioctl",), (Match(1, _BTRFS, 0xFF00),), error=errno.ENOTTY)
    return [*(Rule(("ioctl",), (match,)) for match in allowed), refused]


def _ioctls_but(*refused: int) -> list[Rule]:
    """Allow all requests except these, which differ only in their lowest four bits.

    A filter can only test "equals under a mask", so the complement is spelled out: an allowed request differs in one of
    the upper 28 bits, or is one of the others in the same block of sixteen.
    """
    block = {number >> 4 for number in refused}
    assert len(block) == 1, "the refused requests lie in one block of sixteen"
    base = block.pop() << 4
    rules = [Rule(("ioctl",), (Match(1, ~base & 1 << bit, 1 << bit),)) for bit in range(4, 32)]
    return rules + [Rule(("ioctl",), (Match(1, base + low),)) for low in range(16) if base + low not in refused]


def default_profile() -> Profile:
    return profile("allowed")


@functools.cache
def profile(set_id: SetId) -> Profile:
    refused = tuple(sorted(syscalls.ANSWER_NOT_IMPLEMENTED))
    may_set = set_id in ("allowed", "contained")
    about_modes = frozenset((*_MODES, *_OPENS, _HIDDEN_MODE)) if not may_set else frozenset()
    misleading = _LANDLOCK if set_id == "supervised" else ()
    return Profile(
        (
            Rule(tuple(sorted(syscalls.ALLOWED - about_modes - set(misleading)))),
            Rule((*refused, *misleading), error=errno.ENOSYS),
            Rule(("clone",), (Match(0, 0, NEW_NAMESPACES),)),
            *(Rule(("personality",), (Match(0, value),)) for value in PERSONALITIES),
            *_sockets(),
            *_device_free_mknod(set_id),
            *(_ioctls_but(TIOCSTI, TIOCLINUX) if set_id == "allowed" else _ioctls_beside_volumes()),
            *(_set_id_rules(set_id) if about_modes else ()),
        )
    )


@functools.cache
def virtual_kernel_profile() -> Profile:
    """Return the profile for an OCI runtime with a kernel and a filter of its own: only set-id bits are supervised."""
    made = [Rule((name,), (Match(index, bit, bit),), error=errno.EPERM)
            for name, index in (("mknod", 1), ("mknodat", 2)) for bit in (stat.S_ISUID, stat.S_ISGID)]  # fmt: skip
    return Profile((*_set_id_rules("supervised"), *made), default_error=None)
