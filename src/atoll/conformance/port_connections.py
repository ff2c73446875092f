"""Connections to what listens in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from atoll.conformance.bench import Bench
from atoll.conformance.check import SkippedError, check, must, must_equal, refusal
from atoll.guest.port_streams import AsyncPortStream
from atoll.sandbox.sandbox import AsyncSandbox

# Echoes until the end of its input, then says goodbye. The address to listen on is its argument.
_ECHO = """
import socket, sys, threading
where = sys.argv[1]
if where.isdigit():
    server = socket.create_server(("127.0.0.1", int(where)))
elif where == "v6":
    server = socket.create_server(("::1", 0), family=socket.AF_INET6)
else:
    server = socket.socket(socket.AF_UNIX)
    server.bind(where)
    server.listen(64)
print(server.getsockname()[1] if server.family != socket.AF_UNIX else where, flush=True)
def serve(peer):
    with peer:
        while data := peer.recv(65536):
            peer.sendall(data)
        peer.sendall(b"bye")
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


async def _echo(bench: Bench, sandbox: AsyncSandbox, where: str) -> str:
    """Start the server and return the address where it really listens."""
    if not await bench.has("python3"):
        raise SkippedError("the image has no python3 to listen with")
    command = await sandbox.start(["python3", "-c", _ECHO, where])
    async with asyncio.timeout(20):
        async for piece in command:
            return piece.text.strip()
    raise AssertionError(f"the server did not start: {(await command.wait()).stderr}")


async def _talk(connect: Callable[[], Awaitable[AsyncPortStream]]) -> None:
    async with await connect() as stream, asyncio.timeout(20):
        await stream.write(b"hello \xff")
        must_equal(await _read(stream, 7), b"hello \xff", "the echo")
        await stream.write_eof()
        must_equal(await _read(stream, 3), b"bye", "the answer to the end of our side")
        must_equal(await stream.read(), b"", "the end of the other side")


async def _read(stream: AsyncPortStream, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := await stream.read(count - len(data))):
        data += piece
    return data


@check()
async def a_tcp_port_can_be_reached(bench: Bench) -> None:
    """With the network off; both directions, and each side can end its own."""
    async with bench.sandbox() as sandbox:
        port = int(await _echo(bench, sandbox, "0"))
        await _talk(lambda: sandbox.connect_port(port))


@check()
async def what_listens_is_listed(bench: Bench) -> None:
    """With its address, and with its process where that can be seen."""
    async with bench.sandbox() as sandbox:
        port = int(await _echo(bench, sandbox, "0"))
        found = [each for each in await sandbox.ports() if each.port == port]
        must_equal([each.address for each in found], ["127.0.0.1"], "the addresses it listens on")
        must((found[0].pid is None) == (found[0].process is None), f"half of a process: {found[0]}")
        must("python" in (found[0].process or "python"), f"another process: {found[0]}")


@check()
async def a_unix_socket_can_be_reached(bench: Bench) -> None:
    """By its path, relative to the work directory or absolute."""
    async with bench.sandbox() as sandbox:
        await _echo(bench, sandbox, "sock")
        await _talk(lambda: sandbox.connect_socket("sock"))
        where = (await sandbox.exec("pwd", timeout=10)).stdout.strip()
        await _talk(lambda: sandbox.connect_socket(f"{where}/sock"))


@check()
async def many_connections_carry_much(bench: Bench) -> None:
    """Twenty at once, a megabyte each way on every one, none mixed up."""
    async with bench.sandbox() as sandbox:
        port = int(await _echo(bench, sandbox, "0"))

        async def carry(number: int) -> None:
            content = bytes([number]) * 1_000_000
            async with await sandbox.connect_port(port) as stream:

                async def send() -> None:
                    await stream.write(content)
                    await stream.write_eof()

                sending = asyncio.create_task(send())
                must(await _read(stream, len(content)) == content, f"connection {number} lost or mixed up data")
                await sending

        async with asyncio.timeout(40):
            await asyncio.gather(*(carry(number) for number in range(20)))


@check()
async def a_port_where_nobody_listens_is_refused(bench: Bench) -> None:
    """ConnectionRefusedError at once; numbers that are no port are a ValueError."""
    async with bench.sandbox() as sandbox:
        async with asyncio.timeout(10):
            error = await refusal(sandbox.connect_port(1), ConnectionRefusedError, "a port where nobody listens")
        must("1" in str(error), f"the error does not name the port: {error}")
        for port in (0, -1, 65_536):
            await refusal(sandbox.connect_port(port), ValueError, f"port {port}")


@check()
async def a_connection_that_is_left_is_closed(bench: Bench) -> None:
    """Leaving it early frees it, and the server is still there for the next."""
    async with bench.sandbox() as sandbox:
        port = int(await _echo(bench, sandbox, "0"))
        for _ in range(30):
            stream = await sandbox.connect_port(port)
            await stream.write(b"x" * 1000)
            await stream.aclose()
            await stream.aclose()
        await _talk(lambda: sandbox.connect_port(port))
