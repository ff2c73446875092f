"""The gate: rules in the router's packet filter that refuse connections that no rule of a sandbox's policy could allow.

Each policy is a chain (`threshold.py`), which is shared by all sandboxes with the same policy. A map leads from a
sandbox's address to its chain. The gate allows nothing by itself: the gateway decides about every connection that
passes. On a kernel that cannot log packets to this process there is no gate, and connections are refused only after
they were accepted.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from atoll import workers
from atoll.model.network_policy import NetworkPolicy
from atoll.network.link import netlink, router
from atoll.network.link.nfnetlink import VerdictMap
from atoll.network.link.threshold import steps

_NFT_S = 10.0


class Gate:
    def __init__(self, router_fd: int) -> None:
        self._router = router_fd
        self._chains: set[str] = set()
        self._members: dict[int, str] = {}
        self.is_there = False
        with netlink.inside(router_fd):
            self._map = VerdictMap(router.TABLE, router.POLICIES)

    async def restore(self, members: Mapping[int, NetworkPolicy]) -> None:
        """Replace all rules of the router atomically by those for these sandboxes."""
        chains = dict(_chain(policy) for policy in members.values())
        self._members = {slot: _chain(policy)[0] for slot, policy in members.items()}
        elements = [f"{router.addresses(slot)[1]} : jump {name}" for slot, name in self._members.items()]
        try:
            await self._nft(router.replacing(router.rules("\n".join(chains.values()), elements)))
            self._chains, self.is_there = set(chains), True
        except RuntimeError as error:
            print(f"gateway: connections are refused late: {error}", file=sys.stderr, flush=True)
            await self._nft(router.replacing(router.rules(None)))

    async def admit(self, slot: int, policy: NetworkPolicy) -> None:
        """Apply a policy to the new connections of a sandbox."""
        if not self.is_there:
            return
        name, text = _chain(policy)
        if name not in self._chains:
            await self._nft(f"table inet {router.TABLE} {{\n{text}\n}}\n")
            self._chains.add(name)
        self._map.put(router.addresses(slot)[1], name, replace=slot in self._members)
        self._members[slot] = name

    def forget(self, slot: int) -> None:
        """Remove a sandbox from the gate. May be repeated."""
        if self._members.pop(slot, None) is not None and self.is_there:
            self._map.remove(router.addresses(slot)[1])

    async def collect(self) -> None:
        """Remove the chains that no sandbox uses."""
        if unused := self._chains - set(self._members.values()):
            with suppress(RuntimeError):  # the next call tries again
                await self._nft("".join(f"delete chain inet {router.TABLE} {name}\n" for name in unused))
                self._chains -= unused

    async def _nft(self, text: str) -> None:
        await workers.run(workers.ENGINE, _load, self._router, text)


def _chain(policy: NetworkPolicy) -> tuple[str, str]:
    """Return the name and the nftables text of the chain of a policy."""
    lines = "\n".join(map(str, steps(policy)))
    name = f"policy_{hashlib.sha256(lines.encode()).hexdigest()[:16]}"
    return name, f"chain {name} {{\n{lines}\n}}"


def _load(router_fd: int, text: str) -> None:
    command = [router.nft() or "nft", "-f", "-"]
    try:
        with netlink.inside(router_fd):
            done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=_NFT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError("nft did not end in time") from None
    if done.returncode:
        raise RuntimeError(f"nft: {done.stderr.decode(errors='replace').strip()[:300]}")
