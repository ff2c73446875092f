"""The router: the network namespace of an installation in which the links of all its sandboxes end.

It has no other link, so the kernel cannot forward anything that arrives there, whatever its rules are. The rules drop
everything except TCP and UDP from a sandbox's own address, refuse connections that no rule of the sandbox's policy
could allow (`gate.py`), and pass the rest to the gateway's sockets. A mount keeps the namespace alive, so links outlive
the gateway's process. Without that process they lead nowhere.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from atoll.network.link import netlink
from atoll.network.link.netlink import Links

_libc = ctypes.CDLL(None, use_errno=True)
_BIND, _DETACH = 4096, 2
_BACKLOG = 4096
_TCP, _UDP, _DNS_UDP, _DNS_TCP = 5301, 5302, 5300, 5303
IP_TRANSPARENT, IP_RECVORIGDSTADDR = 19, 20
FIRST = IPv4Address("198.18.0.0")
RESOLVER = FIRST + 1
"""The name server in a sandbox's `resolv.conf`. In fact the resolver answers at every address."""
SLOTS = range(1, 65_536)
MTU = 1500
LINK = "eth0"
"""The name of the link inside the sandbox."""

TABLE, POLICIES = "atoll", "policies"
REFUSED_GROUP = 1
"""The netfilter log group for connections that the gate refuses."""


def rules(chains: str | None = "", members: Sequence[str] = ()) -> str:
    """Return all rules of the router. `chains` are the chains of policies (None: no gate), and `members` the elements
    of the map that leads to them."""
    # The kernel drops what comes too fast, so no sandbox can keep the gateway so busy that others wait.
    elements = f"elements = {{ {', '.join(members)} }};" if members else ""
    gate = f"""
  chain refused {{
    log group {REFUSED_GROUP}
    drop
  }}
  {chains}
  map {POLICIES} {{
    type ipv4_addr : verdict; size 65535; {elements}
  }}"""
    attempt = "" if chains is None else f"tcp flags & (syn|ack) == syn ip saddr vmap @{POLICIES}"
    return f"""
table inet {TABLE} {{
  set connecting {{
    type ipv4_addr; size 65535; flags dynamic; timeout 10s;
  }}
  set asking {{
    type ipv4_addr; size 65535; flags dynamic; timeout 10s;
  }}
  set sending {{
    type ipv4_addr; size 65535; flags dynamic; timeout 10s;
  }}
  {"" if chains is None else gate}
  chain arriving {{
    type filter hook prerouting priority mangle; policy drop;
    meta nfproto ipv6 drop
    fib saddr . iif oif missing drop
    tcp flags & (syn|ack) == syn add @connecting {{ ip saddr limit rate over 300/second burst 1000 packets }} drop
    udp dport 53 add @asking {{ ip saddr limit rate over 500/second burst 1000 packets }} drop
    meta l4proto udp add @sending {{ ip saddr limit rate over 20000/second burst 20000 packets }} drop
    udp dport 53 tproxy ip to :{_DNS_UDP} accept
    tcp dport 53 tproxy ip to :{_DNS_TCP} accept
    {attempt}
    meta l4proto tcp tproxy ip to :{_TCP} accept
    meta l4proto udp tproxy ip to :{_UDP} accept
  }}
  chain local {{
    type filter hook input priority filter; policy drop;
    iifname "s*" socket transparent 1 accept
  }}
  chain through {{
    type filter hook forward priority filter; policy drop;
  }}
}}
"""


def replacing(text: str) -> str:
    """Return rules that replace the existing ones atomically."""
    return f"table inet {TABLE}\ndelete table inet {TABLE}\n{text}"


_SETTINGS = {
    "net/ipv4/ip_forward": "0",
    "net/ipv4/conf/all/rp_filter": "1",
    "net/ipv4/conf/default/rp_filter": "1",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}


@dataclass(frozen=True, slots=True)
class Listeners:
    tcp: socket.socket
    dns_tcp: socket.socket
    udp: socket.socket
    dns_udp: socket.socket


def nft() -> str | None:
    """Return the path of `nft`, which installs the rules and is often not in the PATH of ordinary users."""
    return shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def open_router(path: Path) -> int:
    """Return a descriptor of the namespace that is mounted at `path`. It is made with its rules if it is missing."""
    if path.exists() and _is_namespace(path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    path.touch(0o600)
    fd = netlink.new_network()
    try:
        with netlink.inside(fd):
            # The rules exist before any link, and so before any packet can arrive. The worker adds the gate.
            subprocess.run(
                [nft() or "nft", "-f", "-"], input=rules(None).encode(), check=True, capture_output=True, timeout=10
            )
            for name, value in _SETTINGS.items():
                with suppress(FileNotFoundError):  # a kernel without IPv6
                    Path("/proc/sys", name).write_text(value)
            with Links() as links:
                links.up(socket.if_nametoindex("lo"))
                links.receive_everything(socket.if_nametoindex("lo"))
        _mount(f"/proc/self/fd/{fd}", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove_router(path: Path) -> None:
    """Remove the router and thereby all links. May be repeated."""
    while path.exists() and _is_namespace(path):
        if _libc.umount2(os.fsencode(path), _DETACH):
            break
    path.unlink(missing_ok=True)


def listen(router: int) -> Listeners:
    with netlink.inside(router):
        return Listeners(
            _socket(socket.SOCK_STREAM, _TCP),
            _socket(socket.SOCK_STREAM, _DNS_TCP),
            _socket(socket.SOCK_DGRAM, _UDP),
            _socket(socket.SOCK_DGRAM, _DNS_UDP),
        )


def transparent_socket(router: int, kind: int, address: tuple[str, int]) -> socket.socket:
    """Return a socket in the router that is bound to a foreign address, so that it can send as that host."""
    with netlink.inside(router):
        made = socket.socket(socket.AF_INET, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        made.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def addresses(slot: int) -> tuple[IPv4Address, IPv4Address]:
    """Return the addresses of a link: the router's end and the sandbox's end."""
    return FIRST + 2 * slot, FIRST + 2 * slot + 1


def slot_of(address: IPv4Address) -> int:
    return (int(address) - int(FIRST)) // 2


def link_name(slot: int) -> str:
    return f"s{slot}"


def connect(router: Links, router_fd: int, network: int, slot: int) -> None:
    """Make a link between the router and the network namespace of a sandbox. After a failure there is no link."""
    name, (ours, theirs) = link_name(slot), addresses(slot)
    router.make_pair(name, LINK, network, MTU)
    try:
        with netlink.inside(router_fd):
            index = socket.if_nametoindex(name)
        router.add_address(index, ours, 31)
        with netlink.inside(network), Links() as links:
            far = socket.if_nametoindex(LINK)
            with suppress(FileNotFoundError):  # no IPv6, not even a link-local address; the kernel may not have it
                Path("/proc/sys/net/ipv6/conf/eth0/disable_ipv6").write_text("1")
            links.add_address(far, theirs, 31)
            links.up(far)
            router.up(index)
            links.add_default_route(far, ours)
    except BaseException:
        with suppress(OSError):
            router.delete(name)
        raise


def _socket(kind: int, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    made.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if kind == socket.SOCK_DGRAM:
        made.setsockopt(socket.SOL_IP, IP_RECVORIGDSTADDR, 1)
    made.bind(("0.0.0.0", port))  # noqa: S104
    if kind == socket.SOCK_STREAM:
        made.listen(_BACKLOG)
    return made


def _is_namespace(path: Path) -> bool:
    return os.stat(path).st_dev == os.stat("/proc/self/ns/net").st_dev


def _mount(source: str, target: Path) -> None:
    if _libc.mount(os.fsencode(source), os.fsencode(target), None, _BIND, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
