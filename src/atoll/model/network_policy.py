"""The network policy in a sandbox's spec, which says what the sandbox may reach.

`"none"` allows nothing; `"all"` allows the internet, but not private ranges, metadata services or the host. Rules allow
or deny by name, address, port and protocol. A denial overrides every permission, and what no rule allows is denied.
"""

from __future__ import annotations

import functools
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from atoll.model.addresses import name_of_words, plain_number, within_private
from atoll.model.spelling import before, renamed

Protocol = Literal["web", "tcp", "udp"]
WEB_PORTS = ((80, 80), (443, 443))
_MAX_RULES = 1000
_HEADER_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$"
_HOP_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect", "keep-alive")
)


def _domain(value: object) -> str:
    """Validate a domain: an exact name, `*.example.com` for all names below it, or `*` for every name."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a domain")
    if value == "*":
        return value
    star, rest = ("*.", value[2:]) if value.startswith("*.") else ("", value)
    try:
        return star + name_of_words(rest)
    except ValueError as error:
        raise ValueError(f"{value!r} is not a domain: {error}") from None


def _cidr(value: object) -> str:
    try:
        return str(ip_network(cast(str, value), strict=True))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{value!r} is not a range of addresses: {error}") from None


def _ports(value: object) -> tuple[tuple[int, int], ...]:
    """Parse ports: 443, "443", "8000-8100", (8000, 8100), or a list of those."""
    if isinstance(value, int | str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} are not ports")
    found = []
    for each in value:
        if isinstance(each, str):
            first, _, last = each.partition("-")
            pair = (first, last or first)
        else:
            pair = tuple(each) if isinstance(each, list | tuple) else (each, each)
        try:
            low, high = (int(cast(int, plain_number(part))) for part in pair if isinstance(part, int | str))
        except (TypeError, ValueError):
            raise ValueError(f"{each!r} is not a port") from None
        if isinstance(each, bool) or not 1 <= low <= high <= 65_535:
            raise ValueError(f"{each!r} is not a port")
        found.append((low, high))
    return tuple(found)


_network = functools.lru_cache(4096)(ip_network)

Domain = Annotated[str, BeforeValidator(_domain)]
Cidr = Annotated[str, BeforeValidator(_cidr)]
Ports = Annotated[tuple[tuple[int, int], ...], BeforeValidator(_ports)]


class Rule(BaseModel):
    """One permission or denial, by domain or by addresses. Denials come before permissions."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    action: Literal["allow", "deny"] = "allow"
    """Whether the rule allows or denies."""
    domain: Domain | None = None
    """A host name, `*.NAME` for all names below it, or `*` for all names."""
    cidr: Cidr | None = None
    """An address or a range of addresses."""
    ports: Ports = ()
    """Ports and ranges of ports. Empty: ports 80 and 443 where `web` is allowed, else all ports."""
    protocol: Protocol | None = None
    """`web`: HTTP or TLS in which every request names the domain. `tcp`: anything, to the range or to addresses that
    were resolved for the domain. `udp`: the same for datagrams. `web` with a range opens nothing by itself: names that
    other rules allow may then lead to addresses of this range, although it is private. Default: `web` for an allowed
    domain, `tcp` for an allowed range, and all three for a denial."""

    @model_validator(mode="before")
    @classmethod
    def _one_port(cls, value: Any) -> Any:
        if isinstance(value, dict) and "port" in value and "ports" not in value:
            return {**{key: each for key, each in value.items() if key != "port"}, "ports": value["port"]}
        return value

    @model_validator(mode="after")
    def _sensible(self) -> Rule:
        if (self.domain is None) == (self.cidr is None):
            raise ValueError("a rule has either a domain or a cidr")
        if self.cidr is not None and self.protocol == "web" and self.action == "deny":
            raise ValueError("a denial of protocol 'web' needs a domain")
        return self

    @property
    def network(self) -> IPv4Network | IPv6Network:
        return _network(cast(str, self.cidr))

    @property
    def protocols(self) -> frozenset[Protocol]:
        if self.protocol is not None:
            return frozenset((self.protocol,))
        if self.action == "deny":
            return frozenset(("web", "tcp", "udp"))
        return frozenset(("web",)) if self.domain is not None else frozenset(("tcp",))

    def covers_port(self, port: int) -> bool:
        ports = self.ports or (WEB_PORTS if self.action == "allow" and "web" in self.protocols else ())
        return not ports or any(low <= port <= high for low, high in ports)

    def covers_name(self, name: str) -> bool:
        """Return whether the rule covers a host name, which must be in normal form (see `normal_name`)."""
        if self.domain is None:
            return False
        if self.domain.startswith("*."):
            return name.endswith(self.domain[1:]) and len(name) > len(self.domain) - 1
        return self.domain in ("*", name)

    def __str__(self) -> str:
        ports = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in self.ports)
        return " ".join(
            part for part in (self.action, self.domain or self.cidr, self.protocol, ports and f"port {ports}") if part
        )


class Injection(BaseModel):
    """Headers that the gateway adds to requests to one host, so that a secret never enters the sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    domain: Domain
    """The host name of the requests."""
    headers: dict[Annotated[str, Field(pattern=_HEADER_NAME)], str]
    """The headers to add, by name."""
    tls: bool = False
    """Whether to add them to HTTPS requests instead of plain HTTP requests. The gateway then reads what the sandbox and
    this host say to each other, with a certificate authority that only this sandbox trusts."""

    @field_validator("domain")
    @classmethod
    def _exact(cls, value: str) -> str:
        if value.startswith("*"):
            raise ValueError("headers are added for one host, not for a pattern")
        return value

    @field_validator("headers")
    @classmethod
    def _values(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if name.lower() in _HOP_HEADERS or any(char in text for char in "\r\n\0") or not text.isascii():
                raise ValueError(f"the header {name!r} cannot be added")
        return value


class NetworkRules(BaseModel):
    """What a sandbox may reach, as rules. Without any rule it can reach nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    default: Literal["deny", "allow"] = "deny"
    """What happens to connections that no rule covers: `deny`, or `allow` as the policy `all` does."""
    rules: Annotated[tuple[Rule, ...], Field(max_length=_MAX_RULES)] = ()
    """The rules. Denials come before permissions, in any order."""
    bytes_per_s: Annotated[int, Field(ge=1024)] | None = None
    """The most bytes per second in both directions together, if that is less than what the server allows every
    sandbox."""
    inject: Annotated[tuple[Injection, ...], Field(max_length=100)] = ()
    """Headers to add to requests for certain hosts."""

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        """Convert the short forms, `allowed_domains` and so on, to rules."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        rules = list(value.pop("rules", None) or ())
        for name, action, field in _LISTS:
            listed = value.pop(name, None) or ()
            if isinstance(listed, str) or not isinstance(listed, list | tuple | set | frozenset):
                raise ValueError(f"{name} must be a list")
            rules += [{"action": action, field: each} for each in listed]
        return {**value, "rules": rules}

    @model_validator(mode="after")
    def _injections_are_reachable(self) -> NetworkRules:
        if len({each.domain for each in self.inject}) != len(self.inject):
            raise ValueError("all headers for one domain must be in one entry")
        return self


def _kind(value: object) -> str:
    """Return which form of policy to validate, so that an error refers only to the form that was used."""
    return "rules" if isinstance(value, dict | NetworkRules) else "word"


NetworkPolicy = Annotated[
    Annotated[Literal["none", "all"], Tag("word")] | Annotated[NetworkRules, Tag("rules")], Discriminator(_kind)
]


_SWITCHES = ("network_enabled", "allow_outbound")
_LISTS = (
    ("allowed_domains", "allow", "domain"),
    ("denied_domains", "deny", "domain"),
    ("allowed_cidrs", "allow", "cidr"),
    ("denied_cidrs", "deny", "cidr"),
)
_NAMES = (*_SWITCHES, *(name for name, _, _ in _LISTS), *NetworkRules.model_fields)
HIDDEN = "***"
"""The text that is shown instead of a secret."""


def without_secrets(policy: NetworkPolicy) -> NetworkPolicy:
    """Return a policy that can be shown: the values of added headers are hidden."""
    if not isinstance(policy, NetworkRules) or not policy.inject:
        return policy
    hidden = tuple(each.model_copy(update={"headers": dict.fromkeys(each.headers, HIDDEN)}) for each in policy.inject)
    return policy.model_copy(update={"inject": hidden})


def with_secrets(policy: NetworkPolicy, now: NetworkPolicy = "none") -> NetworkPolicy:
    """Fill the hidden values of a policy that was shown from the current one. ValueError if it does not have them."""
    if not isinstance(policy, NetworkRules):
        return policy
    known = {each.domain: each.headers for each in now.inject} if isinstance(now, NetworkRules) else {}
    whole = []
    for each in policy.inject:
        headers = {
            name: known.get(each.domain, {}).get(name, HIDDEN) if value == HIDDEN else value
            for name, value in each.headers.items()
        }
        if HIDDEN in headers.values():
            raise ValueError(f"the values of headers for {each.domain!r} are missing: they are never shown")
        whole.append(each.model_copy(update={"headers": headers}))
    return policy.model_copy(update={"inject": tuple(whole)})


def opens_tls(policy: NetworkPolicy) -> bool:
    """Return whether headers are added to HTTPS requests, so that the sandbox must trust the gateway's certificate
    authority."""
    return isinstance(policy, NetworkRules) and any(each.tls for each in policy.inject)


def opens_private(policy: NetworkPolicy) -> bool:
    """Return whether a rule allows a part of a private range, which may be the network of the host."""
    rules = policy.rules if isinstance(policy, NetworkRules) else ()
    return any(rule.action == "allow" and rule.cidr is not None and within_private(rule.network) for rule in rules)


def parse_policy(value: object) -> object:
    """Translate the accepted spellings of a policy, those of the Manus example included. A missing or null policy is
    `none`."""
    if value is None or value is False:
        return "none"
    if not isinstance(value, dict):
        if not isinstance(value, str | NetworkRules):
            raise ValueError("a network policy is 'none', 'all' or an object with rules")
        return value
    plain: dict[str, Any] = before(lambda names: renamed(names, _NAMES, of="a network policy"), value)
    enabled = [plain.pop(name) for name in _SWITCHES if name in plain]
    if any(not isinstance(each, bool) and each is not None for each in enabled):
        raise ValueError("network_enabled and allow_outbound must be true or false")
    if enabled and not all(enabled):
        return "none"
    if enabled and not any(name in plain for name in ("default", "rules", "allowed_domains", "allowed_cidrs")):
        # The network is enabled without saying what may be reached.
        return {**plain, "default": "allow"} if plain else "all"
    return plain
