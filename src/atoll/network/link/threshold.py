"""Computes the steps by which the kernel refuses new connections that no rule of a policy could allow. Pure.

The steps agree with what the gateway decides by address, except for two things that only the gateway knows: the name
that a connection will give, and the addresses that its resolver returned. Connections that one of these could allow
pass, and the gateway decides about them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, collapse_addresses, ip_network

from atoll.model.addresses import NEVER, PRIVATE, within_private
from atoll.model.network_policy import WEB_PORTS, NetworkPolicy, NetworkRules, Rule

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Passes or refuses connections to these addresses and ports. An empty tuple stands for all."""

    passes: bool
    networks: tuple[IPv4Network, ...] = ()
    ports: Ranges = ()

    def covers(self, address: IPv4Address, port: int) -> bool:
        return (not self.networks or any(address in network for network in self.networks)) and (
            not self.ports or any(low <= port <= high for low, high in self.ports)
        )

    def __str__(self) -> str:
        """Return the step in the language of nftables, for a chain in which `return` lets a connection pass."""
        networks = f"ip daddr {{ {', '.join(map(str, self.networks))} }} " if self.networks else ""
        ports = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in self.ports)
        verdict = "return" if self.passes else "goto refused"
        return f"{networks}{f'tcp dport {{ {ports} }} ' if ports else ''}{verdict}"


def _v4(texts: Iterable[str]) -> tuple[IPv4Network, ...]:
    found = (ip_network(text) for text in texts)
    return tuple(collapse_addresses(each for each in found if isinstance(each, IPv4Network)))


_NEVER = Step(False, _v4(text for texts in NEVER.values() for text in texts))
_PRIVATE = Step(False, _v4(PRIVATE))


def steps(policy: NetworkPolicy) -> tuple[Step, ...]:
    """Return the steps of a policy, in order. The first one that covers a connection decides; the last covers all."""
    if policy == "none":
        return (Step(False),)
    rules = policy.rules if isinstance(policy, NetworkRules) else ()
    is_open = policy == "all" or (isinstance(policy, NetworkRules) and policy.default == "allow")
    allow = [rule for rule in rules if rule.action == "allow"]
    denied = [rule for rule in rules if rule.action == "deny" and "tcp" in rule.protocols]
    named = [rule for rule in allow if rule.domain is not None and "web" in rule.protocols]
    pinned = [rule for rule in allow if rule.domain is not None and "tcp" in rule.protocols]
    ranges = [rule for rule in allow if rule.cidr is not None and "tcp" in rule.protocols]
    found = [
        *_by_ports(named, WEB_PORTS),
        _NEVER,
        *_by_range(denied, passes=False),
        *_by_range((rule for rule in ranges if within_private(rule.network)), passes=True),
        _PRIVATE,
        *_by_range((rule for rule in ranges if not within_private(rule.network)), passes=True),
        *_by_ports(pinned, ()),
        Step(is_open),
    ]
    return tuple(dict.fromkeys(found))


def _by_ports(rules: list[Rule], otherwise: Ranges) -> list[Step]:
    """Return one step for the ports of all these rules, or none if there are no rules."""
    if not rules:
        return []
    each = [rule.ports or otherwise for rule in rules]
    return [Step(True, (), () if () in each else _merged(pair for ports in each for pair in ports))]


def _by_range(rules: Iterable[Rule], *, passes: bool) -> list[Step]:
    return [
        Step(passes, (rule.network,), _merged(rule.ports))
        for rule in rules
        if rule.cidr is not None and isinstance(rule.network, IPv4Network)
    ]


def _merged(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Merge overlapping ranges, which a set of nftables does not accept."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)
