"""Decides whether a policy lets a sandbox reach a destination. Pure, so that it can be tested with tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.model.addresses import Address, closed_for_all, is_private, unwrapped, within_private
from atoll.model.network_policy import NetworkPolicy, NetworkRules, Protocol, Rule

NOTHING_ALLOWS = "no rule allows it"


@dataclass(frozen=True, slots=True)
class Decision:
    allowed: bool
    rule: str
    """The rule that decided, as text for people."""

    def __bool__(self) -> bool:
        return self.allowed


_NONE = Decision(False, "the network is off")
_DEFAULT = Decision(False, NOTHING_ALLOWS)
_ALL = Decision(True, "all")


class PolicyEvaluator:
    """Evaluates one policy."""

    def __init__(self, policy: NetworkPolicy) -> None:
        self.policy = policy
        rules = policy.rules if isinstance(policy, NetworkRules) else ()
        self._allow = [rule for rule in rules if rule.action == "allow"]
        self._deny = [rule for rule in rules if rule.action == "deny"]
        self.open = policy == "all" or (isinstance(policy, NetworkRules) and policy.default == "allow")
        """Whether destinations that no rule covers may be reached."""
        self.denies_names = any(rule.domain is not None for rule in self._deny)

    def name(self, name: str, port: int, protocol: Protocol) -> Decision:
        """Decide whether a connection that names this host may be made. The name must be normalized."""
        for rule in self._deny:
            if rule.covers_name(name) and rule.covers_port(port) and protocol in rule.protocols:
                return Decision(False, str(rule))
        for rule in self._allow:
            if rule.covers_name(name) and rule.covers_port(port) and protocol in rule.protocols:
                return Decision(True, str(rule))
        return self._otherwise(protocol)

    def lookup(self, name: str) -> Decision:
        """Decide whether the resolver may look this name up."""
        for rule in self._deny:
            if rule.covers_name(name) and not rule.ports and rule.protocol is None:
                return Decision(False, str(rule))
        for rule in self._allow:
            if rule.covers_name(name):
                return Decision(True, str(rule))
        return self._otherwise("tcp")

    def address(self, address: Address, port: int, protocol: Protocol) -> Decision:
        """Decide whether this address may be reached, whatever names lead to it."""
        if closed := closed_for_all(address):
            return Decision(False, f"{closed} are never reached")
        if (denied := self._denied_address(address, port, protocol)) is not None:
            return denied
        for rule in self._allow:
            if self._covers(rule, address) and rule.covers_port(port) and protocol in rule.protocols:
                return Decision(True, str(rule))
        if is_private(address):
            return Decision(False, "private addresses need a rule that names them")
        return self._otherwise(protocol)

    def answer(self, address: Address, port: int | None = None, protocol: Protocol = "web") -> Decision:
        """Decide whether an allowed name may lead to this address."""
        if closed := closed_for_all(address):
            return Decision(False, f"{closed} are never reached")
        if is_private(address) and not any(self._covers(rule, address) for rule in self._allow):
            return Decision(False, "a name may not lead to a private address")
        if port is not None and (denied := self._denied_address(address, port, protocol)) is not None:
            return denied
        return _ALL

    def pinned(self, names: Iterable[str], port: int, protocol: Protocol) -> Decision:
        """Decide whether an address that the resolver returned for these names may be reached by a connection that
        names none of them."""
        found = [self.name(name, port, protocol) for name in names] if not self.open else []
        refused = [each for each in found if not each and each.rule != NOTHING_ALLOWS]
        allowed = [each for each in found if each]
        return (refused or allowed or [_DEFAULT])[0]

    def reads_names(self, port: int) -> bool:
        """Return whether connections to this port are decided by the name that they give."""
        return any(
            rule.domain is not None and "web" in rule.protocols and rule.covers_port(port) for rule in self._allow
        )

    def _denied_address(self, address: Address, port: int, protocol: Protocol) -> Decision | None:
        for rule in self._deny:
            if rule.cidr is None or not rule.covers_port(port) or protocol not in rule.protocols:
                continue
            if any(each.version == rule.network.version and each in rule.network for each in _forms(address)):
                return Decision(False, str(rule))
        return None

    def _covers(self, rule: Rule, address: Address) -> bool:
        if rule.cidr is None:
            return False
        network = rule.network
        if is_private(address) and not within_private(network):
            return False
        return any(each.version == network.version and each in network for each in _forms(address))

    def _otherwise(self, protocol: Protocol) -> Decision:
        if self.policy == "none":
            return _NONE
        if protocol == "udp":
            return Decision(False, "UDP is closed unless a rule opens it")
        return _ALL if self.open else _DEFAULT


def _forms(address: Address) -> tuple[Address, ...]:
    inner = unwrapped(address)
    return (address,) if inner == address else (address, inner)
