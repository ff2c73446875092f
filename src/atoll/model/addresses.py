"""Normalization and classification of host names and addresses.

Decisions must use the results of these functions, never the original text, which may spell the same address in many
ways. Nothing here uses a resolver.
"""

from __future__ import annotations

import re
import unicodedata
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_MAX_NAME = 253
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")
_PLAIN_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE = IPv6Network("::/96")
_ISATAP = 0x5EFE


def normal_name(text: str) -> str:
    """Return a host name in lower case, without a final dot. Raises ValueError if it is not one, or is an address.

    This is for names in network protocols, which are ASCII. Receivers may interpret other letters differently.
    """
    if not text or len(text) > _MAX_NAME + 1 or not text.isascii():
        raise ValueError("it is not a host name")
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("it is not a host name")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError("it is an address")
    return name


def name_of_words(text: str) -> str:
    """Return the normal form of a host name in a policy, which may be in any language: its IDNA encoding.

    Invisible characters and look-alikes of letters and dots are refused rather than replaced.
    """
    if text.isascii():
        return normal_name(text)
    lower = text.lower()
    if len(text) > _MAX_NAME or unicodedata.normalize("NFKC", lower) != lower:
        raise ValueError("it has letters that only look like others")
    if "\u3002" in text or any(unicodedata.category(char)[0] in "CZ" for char in text):
        raise ValueError("it has characters that a host name cannot have")
    try:
        return normal_name(lower.encode("idna").decode())
    except UnicodeError:
        raise ValueError("it is not a host name") from None


def parse_address(text: str) -> Address | None:
    """Parse an address in any spelling that some program accepts: 127.1, 0x7f.1, 0177.0.0.1, 2130706433, [::1], or
    with a final dot. Returns None if the text is not an address. Raises ValueError for malformed ones, such as
    addresses with a zone or with numbers out of range."""
    if "\0" in text or "%" in text:
        raise ValueError("it is not an address")
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare:
        try:
            return IPv6Address(bare)
        except ValueError:
            raise ValueError("it is not an address") from None
    bare = bare.removesuffix(".")
    parts = bare.split(".")
    if not _NUMBER.fullmatch(parts[-1]):
        return None
    return _old_style(parts)


def _old_style(parts: list[str]) -> IPv4Address:
    """Parse an IPv4 address like `inet_aton`: the last part fills all remaining bytes."""
    if len(parts) > 4 or not all(_NUMBER.fullmatch(part) for part in parts):
        raise ValueError("it is not an address")
    values = [_value(part) for part in parts]
    if any(value > 255 for value in values[:-1]) or values[-1] >= 1 << (8 * (5 - len(values))):
        raise ValueError("it is not an address")
    total = values[-1]
    for place, value in enumerate(values[:-1]):
        total |= value << (8 * (3 - place))
    return IPv4Address(total)


def _value(part: str) -> int:
    if part[:2] in ("0x", "0X"):
        return int(part[2:] or "0", 16)
    return int(part, 8) if len(part) > 1 and part[0] == "0" else int(part)


def plain_number(text: object) -> object:
    """Check that a text is a plain decimal number, and return it. Raises ValueError for other forms that Python
    accepts, such as `+80`, `8_0`, `080` and digits of other scripts."""
    if isinstance(text, str) and not _PLAIN_NUMBER.fullmatch(text):
        raise ValueError(f"{text[:20]!r} is not a number")
    return text


def unwrapped(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 one if a router or kernel would deliver to it, else the address."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    number = int(address)
    if any(address in network for network in _NAT64):
        return IPv4Address(number & 0xFFFFFFFF)
    if address in _COMPATIBLE and number > 1:
        return IPv4Address(number)
    if (number >> 32) & 0xFFFF == _ISATAP and (number >> 48) & 0xFFFF in (0, 0x0200):
        return IPv4Address(number & 0xFFFFFFFF)
    return address


NEVER: dict[str, tuple[str, ...]] = {
    "this host": ("0.0.0.0/8", "127.0.0.0/8", "::/128", "::1/128"),
    "metadata services": (
        "169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32", "100.100.100.200/32", "168.63.129.16/32",
        "192.0.0.192/32", "fd00:ec2::/32", "fd20:ce::254/128",
    ),
    "link-local addresses": ("169.254.0.0/16", "fe80::/10", "fec0::/10"),
    "multicast and reserved addresses": ("224.0.0.0/4", "240.0.0.0/4", "ff00::/8"),
    "the links of sandboxes": ("198.18.0.0/15",),
}  # fmt: skip
"""Addresses that are always refused: no rule can allow them."""

PRIVATE: tuple[str, ...] = (
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "192.0.0.0/24", "fc00::/7",
)  # fmt: skip
"""Private ranges. A rule allows one only if its range lies within it, not if a larger range merely covers it."""


def _networks(texts: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(IPv6Network(text) if ":" in text else IPv4Network(text) for text in texts)


_NEVER = {name: _networks(texts) for name, texts in NEVER.items()}
_PRIVATE = _networks(PRIVATE)


def closed_for_all(address: Address) -> str | None:
    """Return the kind of an address that no rule can allow, or None for others. An embedded address counts, too."""
    for each in (address, unwrapped(address)):
        for name, networks in _NEVER.items():
            if any(each.version == network.version and each in network for network in networks):
                return name
    return None


def is_private(address: Address) -> bool:
    return any(
        each.version == network.version and each in network
        for each in (address, unwrapped(address))
        for network in _PRIVATE
    )


def is_public(address: Address) -> bool:
    """Return whether an address is on the internet: not this host, a private network or a special range."""
    return address.is_global and closed_for_all(address) is None and not is_private(address)


def within_private(network: Network) -> bool:
    return any(
        isinstance(network, IPv4Network) == isinstance(private, IPv4Network) and network.subnet_of(private)  # type: ignore[arg-type]
        for private in _PRIVATE
    )
