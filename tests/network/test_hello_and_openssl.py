"""The server name of a TLS client hello as the gateway reads it, and as OpenSSL gives it to a server."""

from __future__ import annotations

import functools
import ssl
import struct
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st

from atoll.network.gateway.hello import BadHelloError, Hello, read_hello
from differential import explore, mutated, runs

NAMES = st.one_of(
    st.sampled_from(("allowed.test", "ALLOWED.test", "a", "x" * 63 + ".test", "1.2.3.4x", "a_b.test")),
    st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{1,10}){0,3}", fullmatch=True),
    st.none(),
)


@functools.cache
def client_hello(name: str | None, version: ssl.TLSVersion, protocols: tuple[str, ...]) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = version
    if protocols:
        context.set_alpn_protocols(list(protocols))
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@dataclass
class Seen:
    asked: bool = False
    """Whether OpenSSL has read the hello to its end."""
    name: str | None = None


def read_by_openssl(data: bytes) -> Seen:
    seen = Seen()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def named(tls: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int:
        seen.asked, seen.name = True, name
        return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE  # the rest of the handshake does not matter

    context.sni_callback = named
    incoming = ssl.MemoryBIO()
    incoming.write(data)
    with pytest.raises(ssl.SSLError):
        context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
    return seen


@st.composite
def hellos(draw: st.DrawFn) -> tuple[str | None, bytes]:
    """A hello and the name in it, in one record or several."""
    name = draw(NAMES)
    version = draw(st.sampled_from((ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)))
    data = client_hello(name, version, draw(st.sampled_from(((), ("h2", "http/1.1"), ("x" * 255,)))))
    # What is random in it would make every run another one.
    message = data[5:11] + bytes(32) + data[43:]
    cuts = sorted(draw(st.lists(st.integers(1, len(message) - 1), max_size=3, unique=True)))
    pieces = [message[start:end] for start, end in zip([0, *cuts], [*cuts, len(message)], strict=True)]
    return name, b"".join(struct.pack("!BHH", 22, 0x0301, len(piece)) + piece for piece in pieces)


@runs
def test_the_name_is_the_same_to_both(times: int) -> None:
    def check(given: tuple[str | None, bytes]) -> None:
        name, data = given
        assert read_hello(data) == Hello(name, False)
        assert read_by_openssl(data) == Seen(True, name)
        assert read_hello(data[:-1]) is None

    explore(check, hellos(), examples=60, times=times)


TOKENS = st.one_of(
    st.binary(min_size=1, max_size=3),
    st.sampled_from(
        (b"\0\0", b"\xff\xff", b"\0", b"allowed.test", b"\x16\x03\x01\0\0", b"\xfe\x0d", b"\0\0\0\5\0\3\0\0\0")
    ),
)


@runs
def test_a_damaged_hello_is_refused_or_names_the_same(times: int) -> None:
    """A server that understands it is told no other name than the gateway has allowed."""

    def check(data: bytes) -> None:
        try:
            found = read_hello(data)
        except BadHelloError:
            return
        seen = read_by_openssl(data)
        if seen.asked:
            assert found is not None, "the gateway waits for more"
            assert found.server_name == seen.name

    explore(check, mutated(hellos().map(lambda given: given[1]), TOKENS), examples=250, times=times)
