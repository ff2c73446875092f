"""A member is a sandbox with a link, as the gateway knows it: its policy, its connections and its refusals."""

from __future__ import annotations

import abc
import asyncio
import math
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from atoll import durable
from atoll.model.addresses import Address
from atoll.model.network_policy import Injection, NetworkPolicy, NetworkRules, Protocol
from atoll.network.authority import Authority
from atoll.network.decision import NOTHING_ALLOWS, Decision, PolicyEvaluator
from atoll.network.gateway.bandwidth_share import DEFAULT_BYTES_PER_S, BandwidthShare
from atoll.network.gateway.socket_owners import Owners
from atoll.network.gateway_files import GatewayFiles
from atoll.network.refusals import RefusalLog
from atoll.token_bucket import TokenBucket

_MAX_PINS = 4096
_MAX_PIN_S = 3600.0
_MIN_PIN_S = 60.0
MAX_CONNECTIONS = 512
MAX_DATAGRAM_FLOWS = 64
_QUESTIONS_BURST, _QUESTIONS_RATE = 200.0, 50.0
_LOOKUPS_BURST, _LOOKUPS_RATE = 20.0, 2.0


class MemberRecord(BaseModel):
    """The record of a member, for the next gateway process."""

    model_config = ConfigDict(frozen=True)
    sandbox_id: str
    slot: int
    policy: NetworkPolicy
    network: int = 0
    """The inode number that identifies the network namespace of the sandbox. 0: it is unknown."""


class Flow(abc.ABC):
    """A connection, or the datagrams between two addresses, that the policy allowed. It is ended when a new policy
    forbids it."""

    def __init__(self, address: Address, port: int, protocol: Protocol, name: str | None) -> None:
        self.address, self.port, self.protocol, self.name = address, port, protocol, name

    @abc.abstractmethod
    def abort(self) -> None: ...


class TcpFlow(Flow):
    def __init__(self, near: socket.socket, address: Address, port: int, protocol: Protocol, name: str | None) -> None:
        super().__init__(address, port, protocol, name)
        self.near = near
        self.far: socket.socket | None = None
        self.task: asyncio.Task[None] | None = None

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()


@dataclass(eq=False, slots=True)
class Member:
    sandbox_id: str
    slot: int
    policy: NetworkPolicy
    log: RefusalLog
    authority_path: Path | None = None
    network: int = 0
    owners: Owners | None = None
    most_bytes_per_s: float = DEFAULT_BYTES_PER_S
    evaluator: PolicyEvaluator = field(init=False)
    injections: dict[str, Injection] = field(init=False)
    share: BandwidthShare = field(init=False)
    flows: set[Flow] = field(default_factory=set)
    pending: int = 0
    datagram_flows: int = 0
    _authority: Authority | None = None
    _pins: dict[Address, dict[str, float]] = field(default_factory=dict)
    _questions: TokenBucket = field(default_factory=lambda: TokenBucket(_QUESTIONS_RATE, _QUESTIONS_BURST))
    _lookups: TokenBucket = field(default_factory=lambda: TokenBucket(_LOOKUPS_RATE, _LOOKUPS_BURST))

    def __post_init__(self) -> None:
        self.share = BandwidthShare(self.most_bytes_per_s)
        self._judge()

    def _judge(self) -> None:
        self.evaluator = PolicyEvaluator(self.policy)
        rules = self.policy if isinstance(self.policy, NetworkRules) else NetworkRules()
        self.injections = {each.domain: each for each in rules.inject}
        self.share.limit(min(self.most_bytes_per_s, rules.bytes_per_s or math.inf))

    def injection(self, name: str, *, tls: bool) -> Injection | None:
        """Return the headers to add to requests to this host, or None."""
        found = self.injections.get(name)
        return found if found is not None and found.tls == tls else None

    def authority(self) -> Authority:
        """Return the sandbox's certificate authority. Raises FileNotFoundError or ValueError if there is none, and
        ImportError if the package 'cryptography' is missing."""
        if self._authority is None:
            if self.authority_path is None:
                raise FileNotFoundError("the sandbox has no certificate authority")
            self._authority = Authority.load(self.authority_path)
        return self._authority

    def change(self, policy: NetworkPolicy) -> None:
        """Replace the policy, and end the flows that the new one does not allow."""
        self.policy = policy
        self._judge()
        for flow in list(self.flows):
            if not self.allows(flow):
                flow.abort()

    def end(self) -> None:
        for flow in list(self.flows):
            flow.abort()

    def allows(self, flow: Flow) -> Decision:
        if flow.name is not None:
            found = self.evaluator.name(flow.name, flow.port, flow.protocol)
            return found if not found else self.evaluator.answer(flow.address, flow.port, flow.protocol)
        return self.by_address(flow.address, flow.port, flow.protocol)

    def by_address(self, address: Address, port: int, protocol: Protocol) -> Decision:
        """Decide whether an address may be reached, either by a rule for addresses or because the resolver returned it
        for an allowed name."""
        found = self.evaluator.address(address, port, protocol)
        if found or (found.rule != NOTHING_ALLOWS and protocol != "udp"):
            return found
        pinned = self.evaluator.pinned(self.names_of(address), port, protocol)
        if not pinned:
            return found if pinned.rule == NOTHING_ALLOWS else pinned
        answer = self.evaluator.answer(address, port, protocol)
        return pinned if answer else answer

    def pin(self, name: str, addresses: tuple[Address, ...], ttl: int) -> None:
        now = time.monotonic()
        until = now + min(max(ttl, _MIN_PIN_S), _MAX_PIN_S)
        if len(self._pins) >= _MAX_PINS:
            self._pins = {
                address: names for address, names in self._pins.items() if any(end > now for end in names.values())
            }
            while len(self._pins) >= _MAX_PINS:
                self._pins.pop(next(iter(self._pins)))
        for address in addresses:
            names = self._pins.setdefault(address, {})
            if len(names) < 64 or name in names:
                names[name] = until

    def names_of(self, address: Address) -> list[str]:
        now = time.monotonic()
        return [name for name, until in self._pins.get(address, {}).items() if until > now]

    def may_ask(self) -> bool:
        """Count a name lookup and return whether it is allowed. The rate is limited, because names can carry data out
        of the sandbox."""
        return self._questions.take()

    async def refuse(
        self, protocol: str, address: object, port: int, name: str, rule: str, source: tuple[str, int] | None = None
    ) -> None:
        """Write a refusal to the network log. `source` is the address of the sandbox's socket, which must still be open
        for its process to be found."""
        process = ""
        if source is not None and self.owners is not None and self._lookups.take():
            process = await self.owners.find(self.network, "tcp" if protocol in ("tcp", "web") else "udp", source)
        self.log.add(protocol, f"{address}:{port}" if address else "", name, rule, process)


class Members:
    """All members, by sandbox id and by slot (the number of the link), and their records on disk."""

    def __init__(self, files: GatewayFiles, most_bytes_per_s: float = DEFAULT_BYTES_PER_S) -> None:
        self._most_bytes_per_s = most_bytes_per_s
        self.directory = files.members
        self._files = files
        self._owners = Owners()
        self.by_slot: dict[int, Member] = {}
        self.by_id: dict[str, Member] = {}

    def load(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.remove_abandoned(self.directory)
        for path in sorted(self.directory.glob("*.json")):
            try:
                record = MemberRecord.model_validate_json(path.read_bytes())
            except (OSError, ValueError):
                path.unlink(missing_ok=True)  # without a policy the sandbox reaches nothing
                continue
            self._put(record)

    def add(self, record: MemberRecord) -> Member:
        """Add a member. Its record is written before it takes effect."""
        self.write(record)
        return self._put(record)

    def write(self, record: MemberRecord) -> None:
        durable.write(self.path(record.sandbox_id), record.model_dump_json())

    def remove(self, sandbox_id: str) -> Member | None:
        member = self.by_id.pop(sandbox_id, None)
        if member is not None:
            self.by_slot.pop(member.slot, None)
            member.end()
        self.path(sandbox_id).unlink(missing_ok=True)
        return member

    def path(self, sandbox_id: str) -> Path:
        return self.directory / f"{sandbox_id}.json"

    def _put(self, record: MemberRecord) -> Member:
        log = RefusalLog(self.log_path(record.sandbox_id))
        authority = self._files.authority(record.sandbox_id)
        member = Member(
            record.sandbox_id,
            record.slot,
            record.policy,
            log,
            authority,
            record.network,
            self._owners,
            self._most_bytes_per_s,
        )
        self.by_slot[record.slot] = self.by_id[record.sandbox_id] = member
        return member

    def log_path(self, sandbox_id: str) -> Path:
        return self.directory / f"{sandbox_id}.log"
