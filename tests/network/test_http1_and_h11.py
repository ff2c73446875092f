"""Requests as the gateway reads and writes them, compared with what h11 makes of the same bytes.

Whatever the gateway accepts, h11 accepts too, as the same request that ends at the same byte. The gateway refuses more:
everything that some server could read differently than h11 does.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path

import h11
import pytest
from hypothesis import strategies as st

from atoll.model import SandboxSpec
from atoll.network.gateway.http1 import BadRequestError, Request, read_request
from atoll.network.gateway.http_requests import Requests
from atoll.network.gateway.member import Member, TcpFlow
from atoll.network.refusals import RefusalLog, RefusedError
from differential import explore, mutated, runs

HOST = b"allowed.test"
NEXT = b"GET /next HTTP/1.1\r\nHost: allowed.test\r\n\r\n"
_BODY = 20


@dataclass
class Reading:
    """A request as h11 reads it, and what it leaves for the next one."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    rest: bytes


def read_by_h11(data: bytes) -> list[Reading]:
    """The whole requests at the start of these bytes. Raises h11.RemoteProtocolError."""
    found: list[Reading] = []
    while data:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        http.receive_data(data)
        request, body = http.next_event(), b""
        if not isinstance(request, h11.Request):
            break
        while isinstance(event := http.next_event(), h11.Data):
            body += event.data
        if not isinstance(event, h11.EndOfMessage):
            break
        data = http.trailing_data[0]
        found.append(Reading(request.method, request.target, list(request.headers), body, data))
    return found


def body_of(request: Request) -> bytes:
    """A body for a request, as the gateway would read it."""
    if request.chunked:
        return b"3\r\nabc\r\n0\r\n\r\n"
    return b"x" * min(request.length, _BODY)


def same_request(head: bytes) -> None:
    head = head.split(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        request = read_request(head)
    except BadRequestError:
        return
    body = body_of(request)
    if request.length > _BODY:
        assert read_by_h11(head + body) == []
        return
    (reading, *_) = read_by_h11(head + body + NEXT)
    assert reading.method == request.method
    assert reading.target == request.target or reading.target.lower().startswith(b"http://" + HOST)
    assert [name for name, _ in reading.headers] == [name.lower() for name, _ in request.headers]
    assert [value.lower() for _, value in reading.headers] == [value.lower() for _, value in request.headers]
    assert (reading.body, reading.rest) == (b"abc" if request.chunked else body, NEXT)
    for keep in (True, False):
        (written, *_) = read_by_h11(request.write(keep_upgrade=keep) + body + NEXT)
        assert (written.method, written.target) == (request.method, request.target)
        assert (written.body, written.rest) == (reading.body, NEXT)
        assert {name for name, _ in written.headers} <= {name for name, _ in reading.headers}


# fmt: off
LINES = st.sampled_from(
    [
        b"GET / HTTP/1.1", b"POST /a?b=c HTTP/1.1", b"PUT /%00 HTTP/1.0", b"OPTIONS * HTTP/1.1", b"HEAD //x HTTP/1.1",
        b"GET http://allowed.test/x HTTP/1.1", b"GET HTTP://ALLOWED.test HTTP/1.1", b"DELETE /#x HTTP/1.1",
    ]
)
FIELDS = st.sampled_from(
    [
        b"Accept: */*", b"X-Empty:", b"X-Tab:\t a\tb \t", b"X-Bytes: \xff\x80", b"x!#$%&'*+-.^_`|~: 1",
        b"Cookie: a=b;c", b"Connection: keep-alive", b"Connection: close", b"Upgrade: websocket",
        b"Expect: 100-continue", b"TE: trailers", b"Connection: Upgrade, HTTP2-Settings", b"Proxy-Authorization: x",
        b"Keep-Alive: 5",
    ]
)
FRAMINGS = st.sampled_from(
    [
        b"", b"Content-Length: 0", b"Content-Length: 5", b"content-length:\t007",
        b"Content-Length: 999999999999999999", b"Transfer-Encoding: chunked", b"transfer-encoding:CHUNKED ",
    ]
)
HOSTS = st.sampled_from((b"Host: allowed.test", b"host:ALLOWED.TEST", b"Host: allowed.test:80", b"Host: [::1]:80"))

BAD_FIELDS = [
    b" folded", b"\tfolded", b": no name", b"no colon", b"", b"X : 1", b"X\t: 1", b"X Y: 1", b"X\0: 1",
    b"X: a\0b", b"X: a\nTransfer-Encoding: chunked", b"X: a\rContent-Length: 5", b"X: \x7f", b"X: \x01",
    b"X: \x0b", b"X\xe9: 1", b"X\r: 1", b"X(: 1", b'"X": 1', b"X: 1\r", b"X: 1\n", b"\nX: 1", b"\rX: 1",
    b"X\n: 1", b"Host: other.test", b"Host: allowed.test", b"Host : other.test", b"Content_Length: 5",
    b"Transfer_Encoding: chunked", b"Transfer.Encoding: chunked", b"content~length: 0", b"Content Length: 5",
]
BAD_LENGTHS = [
    b"+5", b"-5", b"0x5", b"5 5", b"5,5", b"5, 6", b"", b"5;", b"5.0", b"\xb2", b"\xef\xbc\x95", b"1e1", b"5_0",
    b'"5"', b"9" * 19, b"9" * 400, b"\x0b5", b"5\x0c", b"\x005", b"five",
]
BAD_CODINGS = [
    b"gzip", b"identity", b"gzip, chunked", b"chunked, chunked", b"chunked, gzip", b"xchunked", b"chunked;q=1",
    b"", b"\x0bchunked", b"chunked\x0c", b'"chunked"', b"chunked,", b",chunked", b"chun ked", b"chunked\0",
    b"\xa0chunked",
]
BAD_LINES = [
    b"get / HTTP/1.1", b"Get / HTTP/1.1", b" / HTTP/1.1", b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ",
    b" GET / HTTP/1.1", b"GET\t/\tHTTP/1.1", b"GET /", b"GET / HTTP/1.2", b"GET / HTTP/2.0", b"GET / http/1.1",
    b"GET / HTTP/1.10", b"GET /a b HTTP/1.1", b"GET /\xe9 HTTP/1.1", b"GET /\0 HTTP/1.1", b"GET /\r HTTP/1.1",
    b"GET / HTTP/1.1\r", b"", b"\r\nGET / HTTP/1.1", b"GET / HTTP/1.1\nX: 1", b"CONNECT allowed.test:80 HTTP/1.1",
    b"PRI * HTTP/2.0", b"CONNECT / HTTP/1.1", b"GET * HTTP/1.1", b"GET allowed.test HTTP/1.1",
    b"GET http://other.test/ HTTP/1.1", b"GET https://allowed.test/ HTTP/1.1",
    b"GET http://allowed.test@other.test/ HTTP/1.1", b"G(T / HTTP/1.1", b"GET http:///x HTTP/1.1",
    b"GET ://allowed.test/ HTTP/1.1", b"GET /\nX HTTP/1.1", b"A" * 21 + b" / HTTP/1.1",
    b"GET http://allowed.test?x HTTP/1.1", b"GET x://allowed.test/ HTTP/1.1", b"GET / HTTP/1.1 HTTP/1.1",
]
# fmt: on
TOKENS = st.one_of(
    st.sampled_from((b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b"\r\n ", b"\r\n\r\n", b"\x0b", b"\x7f")),
    st.sampled_from(
        (b"\r\nContent-Length: 5", b"\r\nTransfer-Encoding: chunked", b"chunked", b"Host", b"5", b"_", b"/")
    ),
    st.binary(min_size=1, max_size=2),
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Heads that make sense."""
    fields = [draw(HOSTS), draw(FRAMINGS), *draw(st.lists(FIELDS, max_size=3))]
    order = draw(st.permutations([field for field in fields if field]))
    return b"\r\n".join((draw(LINES), *order, b"", b""))


@st.composite
def ambiguous(draw: st.DrawFn) -> bytes:
    """Heads with something in them that two programs could read differently."""
    line, host, framing = b"POST / HTTP/1.1", [b"Host: allowed.test"], draw(FRAMINGS)
    fields = [*draw(st.lists(FIELDS, max_size=2))]
    match draw(st.sampled_from(("field", "field", "length", "coding", "line", "two", "host", "old", "twice"))):
        case "field":
            fields.append(draw(st.sampled_from(BAD_FIELDS)))
        case "length":
            framing = b"Content-Length: " + draw(st.sampled_from(BAD_LENGTHS))
        case "coding":
            framing = b"Transfer-Encoding: " + draw(st.sampled_from(BAD_CODINGS))
        case "line":
            line = draw(st.sampled_from(BAD_LINES))
        case "two":
            framing = b"Transfer-Encoding: chunked"
            fields.append(draw(st.sampled_from((b"Content-Length: 0", b"content-length: 5"))))
        case "host":
            host = []
        case "old":
            line, framing = b"POST / HTTP/1.0", b"Transfer-Encoding: chunked"
        case "twice":
            framing = draw(st.sampled_from((b"Content-Length: 5", b"Transfer-Encoding: chunked")))
            fields.append(framing)
    order = draw(st.permutations([*host, *fields, *([framing] if framing else [])]))
    return b"\r\n".join((line, *order, b"", b""))


@runs
def test_a_request_is_the_same_to_both(times: int) -> None:
    explore(same_request, heads(), examples=100, times=times)


@runs
def test_a_damaged_request_is_refused_or_the_same_to_both(times: int) -> None:
    explore(same_request, mutated(heads(), TOKENS), examples=300, times=times)


ALONE = [
    *(b"\r\n".join((line, b"Host: allowed.test", b"", b"")) for line in BAD_LINES),
    *(
        b"\r\n".join((b"POST / HTTP/1.1", b"Host: allowed.test", field, b"", b""))
        for field in [
            *BAD_FIELDS,
            *(b"Content-Length: " + length for length in BAD_LENGTHS),
            *(b"Transfer-Encoding: " + coding for coding in BAD_CODINGS),
        ]
    ),
]


@pytest.mark.parametrize("head", ALONE)
def test_each_ambiguity_alone_is_refused(head: bytes) -> None:
    with pytest.raises(BadRequestError):
        read_request(head)


@runs
def test_what_is_ambiguous_is_refused(times: int) -> None:
    def check(head: bytes) -> None:
        with pytest.raises(BadRequestError):
            read_request(head)

    explore(check, ambiguous(), examples=250, times=times)


@dataclass
class Carried:
    sent: bytes = b""
    """What the server got."""
    answered: bytes = b""
    refused: bool = False


async def carry(data: bytes, folder: Path) -> Carried:
    """Send these bytes through the gateway, in two pieces, to a server that only listens."""
    near, client = socket.socketpair()
    far, server = socket.socketpair()
    for each in (near, client, far, server):
        each.setblocking(False)
    policy = SandboxSpec.of(network={"allowed_domains": [HOST.decode()]}).network
    flow = TcpFlow(near, IPv4Address("192.0.2.1"), 80, "web", None)
    flow.far = far
    member = Member("one", 1, policy, RefusalLog(folder / "log"))
    found, loop = Carried(), asyncio.get_running_loop()

    async def reached(*_: object) -> None:
        """The server has been reached already."""

    async def serve() -> None:
        try:
            await Requests(reached, member, flow, b"").serve()
        except RefusedError:
            found.refused = True
        except ConnectionError:
            pass
        finally:
            far.close()
            near.close()

    async def listen() -> None:
        while piece := await loop.sock_recv(server, 65536):
            found.sent += piece
        server.close()

    serving, listening = asyncio.create_task(serve()), asyncio.create_task(listen())
    try:
        await loop.sock_sendall(client, data)
        client.shutdown(socket.SHUT_WR)
    except ConnectionError:
        pass  # it was refused before the end
    async with asyncio.timeout(20):
        await asyncio.gather(serving, listening)
    client.close()
    return found


CHUNK_LINES = st.sampled_from((b"%x", b"%X", b"00%x", b"%x ", b"%x;a=b", b"%x ;a", b'%x;a="b;c"', b"%x;\xff"))
# fmt: off
BAD_CHUNKS = st.sampled_from(
    [
        b"0x3\r\nabc\r\n", b"+3\r\nabc\r\n", b"-3\r\nabc\r\n", b" 3\r\nabc\r\n", b"3\nabc\r\n", b"3\r\nabc\n",
        b"3\rabc\r\n", b"3\r\nabcd\r\n", b"4\r\nabc\r\n", b"\r\nabc\r\n", b"3_0\r\nabc\r\n", b"3,\r\nabc\r\n",
        b"g\r\nabc\r\n", b";\r\n\r\n", b"3;\na\r\nabc\r\n", b"3;\0\r\nabc\r\n", b"f" * 16 + b"\r\nabc\r\n",
        b"3\r\nabc\r\r\n", b"3\r\nabc", b"3\r\n\r\nabc\r\n",
    ]
)
# fmt: on
TRAILERS = st.sampled_from((b"", b"", b"X: 1\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"))


@dataclass
class Bodies:
    data: bytes = b""
    bodies: list[bytes] = field(default_factory=list)
    broken: bool = False


@st.composite
def connections(draw: st.DrawFn) -> Bodies:
    """Requests one after the other, whose bodies look like requests, until one is broken."""
    made = Bodies()
    for number in range(draw(st.integers(1, 3))):
        pieces = draw(st.lists(st.sampled_from((b"a", NEXT, b"0\r\n\r\n", b"\r\n", b"x" * 300)), max_size=3))
        made.data += b"POST /%d HTTP/1.1\r\nHost: allowed.test\r\n" % number
        if not draw(st.booleans()):
            made.data += b"Content-Length: %d\r\n\r\n" % len(b"".join(pieces)) + b"".join(pieces)
            made.bodies.append(b"".join(pieces))
            continue
        made.data += b"Transfer-Encoding: chunked\r\n\r\n"
        for piece in pieces:
            made.data += draw(CHUNK_LINES) % len(piece) + b"\r\n" + piece + b"\r\n"
        if draw(st.integers(0, 2)) == 0:
            made.data += draw(BAD_CHUNKS) + b"0\r\n\r\n" + NEXT.replace(b"next", b"after")
            made.broken = True
            return made
        made.data += b"0\r\n" + draw(TRAILERS) + b"\r\n"
        made.bodies.append(b"".join(pieces))
    return made


@runs
def test_the_server_gets_the_requests_that_the_gateway_read(times: int, tmp_path: Path) -> None:
    """And nothing else: of a broken one, not a byte after the fault."""

    def check(made: Bodies) -> None:
        carried = asyncio.run(carry(made.data, tmp_path))
        got = read_by_h11(carried.sent)
        assert [(each.target, each.body) for each in got] == [
            (b"/%d" % at, body) for at, body in enumerate(made.bodies)
        ]
        assert carried.refused == made.broken
        left = got[-1].rest if got else carried.sent
        assert bool(left) == made.broken
        assert b"/after" not in carried.sent

    explore(check, connections(), examples=60, times=times)


@runs
def test_damaged_bytes_reach_the_server_only_as_requests(times: int, tmp_path: Path) -> None:
    """Whatever is sent, h11 has no fault to find with what arrives."""

    def check(data: bytes) -> None:
        carried = asyncio.run(carry(data, tmp_path))
        for each in read_by_h11(carried.sent):
            assert dict(each.headers)[b"host"].lower().rstrip(b".") in (HOST, HOST + b":80")

    explore(check, mutated(connections().map(lambda made: made.data), TOKENS), examples=80, times=times)
