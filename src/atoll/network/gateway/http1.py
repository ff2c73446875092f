"""Parses HTTP/1 requests strictly and writes them again, so that the server sees the same requests as the gateway.

Everything that two programs could read differently is refused: bare line feeds, folded headers, two lengths, a length
in addition to chunks. Pure; the bytes may be hostile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from atoll.model.addresses import Address, normal_name, parse_address

MAX_HEAD = 64 * 1024
_MAX_HEADERS = 200
_TOKEN = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_LINE = re.compile(rb"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.([01])")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host", b"connection", b"upgrade"))
_DROPPED = frozenset((b"proxy-connection", b"proxy-authorization", b"http2-settings", b"te", b"trailer"))


class BadRequestError(ValueError):
    pass


@dataclass(slots=True)
class Request:
    method: bytes
    target: bytes
    version: bytes
    headers: list[tuple[bytes, bytes]]
    host: str
    """The Host header without the port, as written by the client."""
    port: int | None
    length: int = 0
    chunked: bool = False
    upgrades: bool = False
    added: list[tuple[bytes, bytes]] = field(default_factory=list)

    def write(self, *, keep_upgrade: bool) -> bytes:
        lines = [b"%s %s HTTP/1.%s" % (self.method, self.target, self.version)]
        replaced = {_variable(name) for name, _ in self.added}
        for name, value in self.headers:
            lower = name.lower()
            if lower in _DROPPED or _variable(name) in replaced or (lower == b"upgrade" and not keep_upgrade):
                continue
            if lower == b"connection" and not keep_upgrade:
                value = b"close" if b"close" in value.lower() else b"keep-alive"
            elif lower == b"transfer-encoding":
                value = b"chunked"  # in the one spelling that all servers know
            elif lower == b"content-length":
                value = b"%d" % self.length
            lines.append(b"%s: %s" % (name, value))
        lines += [b"%s: %s" % pair for pair in self.added]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def destination(self) -> str | Address:
        """Return the host of the request: a normalized name or an address. Raises ValueError for anything else."""
        found = parse_address(self.host)
        return found if found is not None else normal_name(self.host)


def read_request(head: bytes) -> Request:
    """Parse a request. `head` ends with the empty line. Raises BadRequestError."""
    lines = head[:-4].split(b"\r\n")
    matched = _LINE.fullmatch(lines[0])
    if matched is None or len(lines) > _MAX_HEADERS:
        raise BadRequestError("the request line is malformed")
    method, target, version = matched.groups()
    headers = [_header(line) for line in lines[1:]]
    hosts = [value for name, value in headers if name.lower() == b"host"]
    if len(hosts) != 1:
        raise BadRequestError("a request needs one Host")
    if method in (b"CONNECT", b"PRI"):
        raise BadRequestError(f"{method.decode()} is not possible here: connect to the host itself")
    target = _origin_form(method, target, hosts[0])
    host, port = _split(hosts[0])
    request = Request(method, target, version, headers, host, port)
    _framing(request)
    request.upgrades = any(name.lower() == b"upgrade" and value.lower() == b"websocket" for name, value in headers)
    return request


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    value = value.strip(b" \t")
    # This refuses folded headers too: their continuation lines begin with a space, so the name is not a token.
    if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise BadRequestError("a header is malformed")
    if _variable(name) in _FRAMING and name.lower() not in _FRAMING:
        raise BadRequestError("a header could be mistaken for a framing header")
    return name, value


def _variable(name: bytes) -> bytes:
    """Normalize the name of a header as servers do that turn headers into environment variables: `X_Api_Key` and
    `X-Api-Key` are then the same."""
    return re.sub(rb"[^a-z0-9]", b"-", name.lower())


def _origin_form(method: bytes, target: bytes, host: bytes) -> bytes:
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target
    scheme, slashes, rest = target.partition(b"://")
    authority, slash, path = rest.partition(b"/")
    if scheme.lower() != b"http" or not slashes or authority.lower() != host.lower():
        raise BadRequestError("the target and the Host do not agree")
    return slash + path or b"/"


def _split(host: bytes) -> tuple[str, int | None]:
    text = host.decode("latin-1")
    name, colon, port = text.rpartition(":")
    if colon and not text.endswith("]"):
        if not _PORT.fullmatch(port) or int(port) > 65_535:
            raise BadRequestError("the Host is malformed")
        return name, int(port)
    return text, None


def _framing(request: Request) -> None:
    lengths = [value for name, value in request.headers if name.lower() == b"content-length"]
    codings = [value for name, value in request.headers if name.lower() == b"transfer-encoding"]
    if codings:
        if lengths or len(codings) > 1 or codings[0].lower() != b"chunked" or request.version == b"0":
            raise BadRequestError("the length of the request is ambiguous")
        request.chunked = True
    elif lengths:
        if len(lengths) > 1 or not re.fullmatch(rb"[0-9]{1,18}", lengths[0]):
            raise BadRequestError("the length of the request is ambiguous")
        request.length = int(lengths[0])


def read_chunk_size(line: bytes) -> int:
    """Parse the line with a chunk's size, given without its line end. Raises BadRequestError."""
    matched = _CHUNK.fullmatch(line)
    if matched is None:
        raise BadRequestError("a chunk is malformed")
    return int(matched[1], 16)


def refusal(status: str, text: str) -> bytes:
    body = text.encode() + b"\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"X-Atoll-Refused: 1\r\nConnection: close\r\n\r\n" + body
