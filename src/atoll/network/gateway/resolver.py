"""The DNS resolver, which sandboxes reach at every address. It looks up only allowed names and only IPv4 addresses, and
returns only addresses that may be reached.

A question is never forwarded as it came, so its type, its options and its spelling cannot carry data out. Questions of
other types about an allowed name get an empty answer. Those types include the ones that would let a client encrypt the
name of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from atoll.model.addresses import Address, normal_name
from atoll.network.gateway import dns
from atoll.network.gateway.dns import Answer, BadMessageError
from atoll.network.gateway.member import Member

_TRY_S, _TOTAL_S = 2.0, 6.0
_MAX_CACHED = 10_000
_MAX_TTL, _MIN_TTL = 300, 1
_TCP_IDLE_S = 10.0
_FAILED_TTL = 2
NO_ADDRESS = "it has no IPv4 address, and IPv6 is closed"


class LookupFailedError(Exception):
    """No server answered, or the name does not exist. `code` is the response code of DNS."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the name cannot be resolved (code {code})")
        self.code = code


class Resolver:
    def __init__(self, servers: Sequence[tuple[str, int]]) -> None:
        self._servers = tuple(servers)
        self._cache: dict[str, tuple[float, Answer]] = {}
        self._running: dict[str, asyncio.Task[Answer]] = {}

    async def lookup(self, name: str) -> Answer:
        """Look up a normalized name. Concurrent lookups of the same name share one question. Raises
        LookupFailedError."""
        answer = await self._answer_to(name)
        if answer.code:
            raise LookupFailedError(answer.code)
        return answer

    async def _answer_to(self, name: str) -> Answer:
        cached = self._cache.get(name)
        if cached is not None and cached[0] > time.monotonic():
            return cached[1]
        task = self._running.get(name)
        if task is None:
            task = asyncio.create_task(self._ask(name), name=f"lookup {name}")
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        return await asyncio.shield(task)

    async def allowed(self, member: Member, name: str, port: int | None) -> tuple[Address, ...]:
        """Return the addresses of a name. Raises PermissionError if the sandbox may not reach one of them, and
        LookupFailedError if the name cannot be resolved."""
        answer = await self.lookup(name)
        for address in answer.addresses:
            found = member.evaluator.answer(address, port)
            if not found:
                raise PermissionError(f"{name} leads to {address}: {found.rule}")
        return answer.addresses

    async def answer(self, member: Member, message: bytes, source: tuple[str, int] | None = None) -> bytes | None:
        """Return the answer to a sandbox's question, or None to send none. `source` is the sandbox's address if the
        question came by UDP."""
        try:
            question = dns.read_question(message)
        except BadMessageError:
            return None
        try:
            name = normal_name(question.name)
        except ValueError:
            await member.refuse("dns", "", 0, question.name, "it is no name of a host", source)
            return dns.write_answer(question, Answer(dns.NXDOMAIN))
        decision = member.evaluator.lookup(name)
        if not decision:
            await member.refuse("dns", "", 0, name, decision.rule, source)
            return dns.write_answer(question, Answer(dns.NXDOMAIN))
        if not member.may_ask():
            await member.refuse("dns", "", 0, name, "too many questions")
            return dns.write_answer(question, Answer(dns.REFUSED))
        return dns.write_answer(question, await self._addresses(member, name, question.kind, source))

    async def _addresses(self, member: Member, name: str, kind: int, source: tuple[str, int] | None) -> Answer:
        if kind != dns.A:
            return Answer(dns.NOERROR)
        try:
            addresses = await self.allowed(member, name, None)
            ttl = min(max((await self.lookup(name)).ttl, _MIN_TTL), _MAX_TTL)
        except PermissionError as error:
            await member.refuse("dns", "", 0, name, str(error), source)
            return Answer(dns.NXDOMAIN)
        except LookupFailedError as error:
            return Answer(error.code)
        if not addresses:
            await member.refuse("dns", "", 0, name, NO_ADDRESS, source)
        member.pin(name, addresses, ttl)
        return Answer(dns.NOERROR, addresses, ttl)

    async def _ask(self, name: str) -> Answer:
        answer = Answer(dns.SERVFAIL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TOTAL_S):
                for server in self._servers * 2:
                    with contextlib.suppress(OSError, TimeoutError, BadMessageError):
                        answer = await self._ask_one(server, name)
                        break
        ttl = _FAILED_TTL if answer.code else min(max(answer.ttl, _MIN_TTL), _MAX_TTL)
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[name] = (time.monotonic() + ttl, answer)
        return answer

    async def _ask_one(self, server: tuple[str, int], name: str) -> Answer:
        loop = asyncio.get_running_loop()
        number = secrets.randbelow(1 << 16)
        question = dns.write_question(number, name, dns.A)
        with socket.socket(socket.AF_INET6 if ":" in server[0] else socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.setblocking(False)
            asked.connect(server)
            await loop.sock_sendall(asked, question)
            async with asyncio.timeout(_TRY_S):
                while True:
                    message = await loop.sock_recv(asked, 4096)
                    with contextlib.suppress(BadMessageError):
                        answer = dns.read_answer(message, number, name, dns.A)
                        break
        return await self._ask_by_stream(server, name) if answer.truncated else answer

    async def _ask_by_stream(self, server: tuple[str, int], name: str) -> Answer:
        number = secrets.randbelow(1 << 16)
        question = dns.write_question(number, name, dns.A)
        async with asyncio.timeout(_TRY_S):
            reader, writer = await asyncio.open_connection(*server)
            try:
                writer.write(struct.pack("!H", len(question)) + question)
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                message = await reader.readexactly(length)
            except asyncio.IncompleteReadError as error:
                raise BadMessageError("it is cut short") from error
            finally:
                writer.close()
        return dns.read_answer(message, number, name, dns.A)

    async def serve_stream(self, member: Member, connection: socket.socket) -> None:
        """Answer questions over a TCP connection, one after the other."""
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            while True:
                async with asyncio.timeout(_TCP_IDLE_S):
                    (length,) = struct.unpack("!H", await _exactly(connection, 2))
                    message = await _exactly(connection, length)
                answer = await self.answer(member, message)
                if answer is None:
                    return
                async with asyncio.timeout(_TCP_IDLE_S):
                    await loop.sock_sendall(connection, struct.pack("!H", len(answer)) + answer)


async def _exactly(connection: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    found = b""
    while len(found) < count:
        piece = await loop.sock_recv(connection, count - len(found))
        if not piece:
            raise asyncio.IncompleteReadError(found, count)
        found += piece
    return found


def servers_of(resolv_conf: str) -> list[tuple[str, int]]:
    """Return the first name servers that a `resolv.conf` lists, with their port."""
    found = []
    for line in resolv_conf.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver" and "%" not in words[1]:
            found.append((words[1], 53))
    return found[:3]
