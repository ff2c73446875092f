"""The transparent proxy, in which every TCP connection of a sandbox ends and goes on only if the policy allows it.

A connection is allowed by its address if a rule covers the address or the resolver returned it for an allowed name.
Where rules are about names, a connection is allowed by the name that it gives. The gateway then resolves the name
itself and connects to the result, whatever address the sandbox had chosen.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from ipaddress import IPv4Address, ip_address

from atoll.model.addresses import Address, normal_name
from atoll.network.gateway import hello, http1, relay
from atoll.network.gateway.hello import BadHelloError
from atoll.network.gateway.http_requests import Requests, UnreachedError
from atoll.network.gateway.member import MAX_CONNECTIONS, Member, TcpFlow
from atoll.network.gateway.relay import keep_alive, reset
from atoll.network.gateway.resolver import NO_ADDRESS, LookupFailedError, Resolver
from atoll.network.gateway.tls import TlsEnd
from atoll.network.refusals import RefusedError

_FIRST_BYTES_S = 5.0
_GLANCE_S = 0.3
"""How long to wait for the first bytes of a connection that needs no name, in case it gives a name that is denied."""
_CONNECT_S = 10.0
_MAX_TRIED = 3
_LAST_WORDS_S = 5.0
_TRUST_S = 3600.0
_PIECE = 16 * 1024


class Proxy:
    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._trusted: tuple[float, ssl.SSLContext] | None = None

    async def serve(self, member: Member, near: socket.socket, destination: tuple[str, int]) -> None:
        """Serve one connection until it ends."""
        address, port = IPv4Address(destination[0]), destination[1]
        flow = TcpFlow(near, address, port, "tcp", None)
        flow.task = asyncio.current_task()
        try:
            if len(member.flows) >= MAX_CONNECTIONS:
                raise RefusedError(f"more than {MAX_CONNECTIONS} connections at once")
            member.flows.add(flow)
            keep_alive(near)
            found = member.by_address(address, port, "tcp")
            if found and member.evaluator.denies_names:
                await self._unless_denied(member, flow)
                return
            if found and member.injections:
                await self._with_headers(member, flow)
                return
            if found:
                await self._connect(flow, [address])
            elif member.evaluator.reads_names(port):
                await self._by_name(member, flow)
                return
            else:
                raise RefusedError(found.rule, ", ".join(member.names_of(address)))
            await self._pass(member, flow, b"")
        except RefusedError as error:
            await member.refuse(error.protocol, address, port, error.name, error.rule, _source(near))
            await _say(near, error.said or (hello.alert() if error.protocol == "web" else b""))
        except UnreachedError as error:
            await _say(near, error.said)
        except (OSError, TimeoutError, asyncio.CancelledError):
            reset(near)
        finally:
            member.flows.discard(flow)
            for each in (flow.far, near):
                if each is not None:
                    each.close()

    # --- by name ---------------------------------------------------------------------------------------------------

    async def _by_name(self, member: Member, flow: TcpFlow) -> None:
        start = await _until_known(flow.near, _FIRST_BYTES_S)
        flow.protocol = "web"
        if hello.looks_like_tls(start):
            await self._by_server_name(member, flow, start)
        elif hello.looks_like_http(start):
            await Requests(self.reach, member, flow, start).serve()
        else:
            raise RefusedError("only HTTP and TLS give a name; other protocols need a rule with protocol 'tcp'")

    async def _by_server_name(self, member: Member, flow: TcpFlow, start: bytes) -> None:
        start, name = await _server_name(flow.near, start)
        if member.injection(name, tls=True) is not None:
            await self._opened(member, flow, start, name)
            return
        await self.reach(member, flow, name)
        await self._pass(member, flow, start)

    async def reach(self, member: Member, flow: TcpFlow, name: str) -> None:
        """Connect to the host of this name if the policy allows the name and its addresses. Raises RefusedError if it
        does not, and OSError or TimeoutError if the host cannot be reached."""
        decision = member.evaluator.name(name, flow.port, "web")
        if not decision:
            raise RefusedError(decision.rule, name, "web")
        try:
            addresses = await self._resolver.allowed(member, name, flow.port)
        except PermissionError as error:
            raise RefusedError(str(error), name, "web") from None
        except LookupFailedError as error:
            raise ConnectionError(str(error)) from error
        flow.name = name
        await self._connect(flow, addresses)

    async def _opened(self, member: Member, flow: TcpFlow, start: bytes, name: str) -> None:
        """Serve a TLS connection to whose requests headers are added.

        It becomes two TLS connections: one with the sandbox, with a certificate of the sandbox's own authority, and one
        with the host, whose certificate must be valid.
        """
        flow.protocol, destination, source = "web", flow.address, _source(flow.near)
        decision = member.evaluator.name(name, flow.port, "web")
        if not decision:
            raise RefusedError(decision.rule, name, "web")
        try:
            context = member.authority().context(name)
        except (OSError, ValueError, ImportError) as error:
            raise RefusedError(f"headers cannot be added over TLS: {error}", name, "web") from error
        async with AsyncExitStack() as ends:
            near = TlsEnd(flow.near, context, name, server=True)
            ends.push_async_callback(near.close)
            await near.open(start)

            async def reach(member: Member, flow: TcpFlow, name: str) -> None:
                await self.reach(member, flow, name)
                assert flow.far is not None
                ends.callback(flow.far.close)
                far = TlsEnd(flow.far, self._trust(), name, server=False)
                ends.push_async_callback(far.close)
                await far.open()
                flow.far = far.plain

            flow.near = near.plain
            try:
                await Requests(reach, member, flow, b"", tls_name=name).serve()
            except RefusedError as error:
                await member.refuse(error.protocol, destination, flow.port, error.name, error.rule, source)
                await _say(near.plain, error.said)
            except UnreachedError as error:
                await _say(near.plain, error.said)
            with suppress(OSError):
                near.plain.shutdown(socket.SHUT_WR)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await near.drain()

    def _trust(self) -> ssl.SSLContext:
        """Return a TLS context for connections to hosts. It trusts what the machine trusts, or SSL_CERT_FILE."""
        made_at, context = self._trusted or (0.0, None)
        if context is None or time.monotonic() - made_at > _TRUST_S:
            context = ssl.create_default_context()
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.set_alpn_protocols(["http/1.1"])
            self._trusted = (time.monotonic(), context)
        return context

    async def _unless_denied(self, member: Member, flow: TcpFlow) -> None:
        """Serve a connection to an allowed address, unless it gives a name that is denied."""
        addresses: list[Address] = [flow.address]
        try:
            start = await _until_known(flow.near, _GLANCE_S)
        except TimeoutError:
            start = b""  # in this protocol the server sends first
        if hello.looks_like_http(start):
            await Requests(self.reach, member, flow, start).serve()
            return
        if hello.looks_like_tls(start):
            start, name = await _server_name(flow.near, start)
            decision = member.evaluator.name(name, flow.port, "web")
            if not decision:
                raise RefusedError(decision.rule, name, "web")
            if member.injection(name, tls=True) is not None:
                await self._opened(member, flow, start, name)
                return
        await self._connect(flow, addresses)
        await self._pass(member, flow, start)

    async def _with_headers(self, member: Member, flow: TcpFlow) -> None:
        """Serve a connection to an allowed address, and add headers if it names a host that has any to be added."""
        address = flow.address
        try:
            start = await _until_known(flow.near, _GLANCE_S)
        except TimeoutError:
            start = b""  # in this protocol the server sends first
        if start:
            start, name = await _first_name(flow.near, start)
            if hello.looks_like_tls(start) and member.injection(name, tls=True) is not None:
                await self._opened(member, flow, start, name)
                return
            if hello.looks_like_http(start) and member.injection(name, tls=False) is not None:
                await Requests(self.reach, member, flow, start).serve()
                return
        await self._connect(flow, [address])
        await self._pass(member, flow, start)

    # --- connecting ------------------------------------------------------------------------------------------------

    async def _connect(self, flow: TcpFlow, addresses: Sequence[Address]) -> None:
        last: Exception = ConnectionError(NO_ADDRESS)
        for address in addresses[:_MAX_TRIED]:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    flow.far = await _dial(address, flow.port)
            except (OSError, TimeoutError) as error:
                last = error
                continue
            flow.address = address
            return
        raise last

    async def _pass(self, member: Member, flow: TcpFlow, start: bytes) -> None:
        assert flow.far is not None
        if start:
            await asyncio.get_running_loop().sock_sendall(flow.far, start)
        await relay.relay(flow.near, flow.far, member.share)


async def _dial(address: Address, port: int) -> socket.socket:
    refuse_own(address)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(made, (str(address), port))
        keep_alive(made)
        # A route or a redirection may have led the connection back to this machine.
        if ip_address(made.getpeername()[0]) != address or made.getsockname()[0] == str(address):
            raise RefusedError("this host is never reached")
    except BaseException:
        made.close()
        raise
    return made


def _source(near: socket.socket) -> tuple[str, int] | None:
    try:
        host, port = near.getpeername()[:2]
    except OSError:
        return None
    return str(host), int(port)


def refuse_own(address: Address) -> None:
    """Raise RefusedError if this is one of the machine's own addresses, that is, one that it can bind to."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return
            raise
    raise RefusedError("this host is never reached")


async def _until_known(near: socket.socket, seconds: float) -> bytes:
    """Read the first bytes of a connection, until they show which protocol it speaks."""
    loop = asyncio.get_running_loop()
    start = b""
    async with asyncio.timeout(seconds):
        while True:
            piece = await loop.sock_recv(near, _PIECE)
            start += piece
            if not piece:
                raise RefusedError("it ended before it gave a name")
            if hello.looks_like_tls(start) and len(start) >= 5:
                return start
            if not hello.looks_like_tls(start) and (not hello.looks_like_http(start) or b" " in start[:20]):
                return start


async def _first_name(near: socket.socket, start: bytes) -> tuple[bytes, str]:
    """Return all bytes that were read to find it, and the first host name that a connection gives. The name is empty if
    none can be read."""
    loop = asyncio.get_running_loop()
    with suppress(TimeoutError, ValueError):
        async with asyncio.timeout(_FIRST_BYTES_S):
            while True:
                if hello.looks_like_tls(start):
                    if (found := hello.read_hello(start)) is not None:
                        return start, normal_name(found.server_name or "")
                elif b"\r\n\r\n" in start:
                    head = start[: start.index(b"\r\n\r\n") + 4]
                    return start, normal_name(http1.read_request(head).host)
                elif not hello.looks_like_http(start):
                    break
                piece = await loop.sock_recv(near, _PIECE)
                start += piece
                if not piece or len(start) > http1.MAX_HEAD:
                    break
    return start, ""


async def _server_name(near: socket.socket, start: bytes) -> tuple[bytes, str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_FIRST_BYTES_S):
            while (found := hello.read_hello(start)) is None:
                piece = await loop.sock_recv(near, _PIECE)
                start += piece
                if not piece or len(start) > 2 * hello.MAX_HELLO:
                    raise RefusedError("the TLS hello is cut short or too long", "", "web")
        name = normal_name(found.server_name or "")
    except BadHelloError as error:
        raise RefusedError(str(error), "", "web") from None
    except TimeoutError:
        raise RefusedError("the TLS hello did not come in time", "", "web") from None
    except ValueError as error:
        raise RefusedError(f"it gives no server name: {error}", "", "web") from None
    if found.encrypted:
        raise RefusedError("an encrypted hello hides the name", name, "web")
    return start, name


async def _say(near: socket.socket, said: bytes) -> None:
    """Send a last message in the protocol of the connection, so that the client can show it, and close the connection.
    Without a message, reset it."""
    with suppress(OSError, TimeoutError):
        if said:
            async with asyncio.timeout(1):
                await asyncio.get_running_loop().sock_sendall(near, said)
                near.shutdown(socket.SHUT_WR)
                while await asyncio.get_running_loop().sock_recv(near, _PIECE):
                    pass
            near.close()
            return
    reset(near)
