"""The offline internet's servers: web, TLS, DNS, a protocol where the server speaks first, UDP. Run in a network
namespace of its own; writes down all that it is asked.

    python world.py LOG CERTIFICATE KEY WEB-ROOT
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import sys
import time
from pathlib import Path
from typing import Any

WEB = "203.0.113.10"
EVIL = "203.0.113.66"
GIT = "203.0.113.22"
PRIVATE = "10.99.0.5"
METADATA = "169.254.169.254"
NAMES: dict[str, list[list[str]]] = {
    "allowed.test": [[WEB]],
    "big.allowed.test": [[WEB]],
    "a.w.test": [[WEB]],
    "w.test": [[WEB]],
    "git.test": [[GIT]],
    "six.test": [[]],
    "stranger.test": [[WEB]],
    "evil.test": [[EVIL]],
    "notallowed.test": [[EVIL]],
    "inside.test": [[PRIVATE]],
    "meta.test": [[METADATA]],
    "loop.test": [["127.0.0.1"]],
    "mixed.test": [[WEB, PRIVATE]],
    "rebind-native.test": [[EVIL], [EVIL], [PRIVATE]],
    "rebind-oci.test": [[EVIL], [EVIL], [PRIVATE]],
    "rebind-docker.test": [[EVIL], [EVIL], [PRIVATE]],
    "host.test": [["192.0.2.1"]],
}
CANARIES = {PRIVATE: "CANARY-PRIVATE", METADATA: "CANARY-METADATA", EVIL: "EVIL", WEB: "WEB", GIT: "GIT"}
log_file: Any


def note(**what: object) -> None:
    log_file.write(json.dumps({"time": time.time(), **what}) + "\n")
    log_file.flush()


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, root: Path) -> None:
    """HTTP/1.1 with connections that stay, as naive as real ones: each request is answered with what it said."""
    local = writer.get_extra_info("sockname")[0]
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *headers = head.split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in headers)}
            note(kind="http", at=local, line=line, host=fields.get("host"), headers=fields)
            body = b""
            if "content-length" in fields:
                body = await reader.readexactly(int(fields["content-length"]))
            elif fields.get("transfer-encoding") == "chunked":
                while size := int((await reader.readline()).split(b";")[0], 16):
                    body += await reader.readexactly(size + 2)
                await reader.readline()
            path = line.split(" ")[1]
            if fields.get("upgrade") == "websocket" and path == "/ws":
                writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
                while data := await reader.read(65536):
                    writer.write(data[::-1])
                return
            if path == "/redirect":
                writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n")
                continue
            if path.startswith("/bytes/"):
                count = int(path.split("/")[2])
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % count)
                block = b"x" * (1 << 20)
                while count > 0:
                    writer.write(block[:count])
                    count -= len(block)
                    await writer.drain()
                continue
            if path == "/slow":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while True:
                    writer.write(b"2\r\n.\n\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            file = (root / path.split("?")[0].lstrip("/")).resolve()
            if path != "/" and file.is_relative_to(root) and file.is_dir():
                file /= "index.html"
            if path != "/" and file.is_relative_to(root) and file.is_file():
                answer, kind = file.read_bytes(), "text/html" if file.suffix == ".html" else "application/octet-stream"
            else:
                said = {"at": CANARIES.get(local, local), "line": line, "headers": fields, "body": len(body)}
                answer, kind = json.dumps(said).encode(), "application/json"
            writer.write(
                f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer
            )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, ValueError, ssl.SSLError):
        pass
    finally:
        writer.close()


async def banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that speaks first, as SSH's does."""
    note(kind="tcp", at=writer.get_extra_info("sockname")[:2])
    writer.write(b"SSH-2.0-world\r\n")
    try:
        while data := await reader.read(4096):
            writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


class Dns(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.asked: dict[str, int] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: tuple[str | Any, int]) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
            at += 1 + data[at]
        (kind,) = struct.unpack_from("!H", data, at + 1)
        question = data[12 : at + 5]
        name = ".".join(labels).lower()
        note(kind="dns", name=name, type=kind)
        known = NAMES.get(name)
        turn = self.asked.get(name, 0)
        self.asked[name] = turn + 1
        addresses = known[min(turn, len(known) - 1)] if known and kind == 1 else []
        answers = b"".join(struct.pack("!HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(each) for each in addresses)
        code = 0x8180 if known else 0x8183
        head = data[:2] + struct.pack("!5H", code, 1, len(addresses), 0, 0)
        self.transport.sendto(head + question + answers, address)  # type: ignore[attr-defined]


class Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: tuple[str | Any, int]) -> None:
        note(kind="udp", data=data.decode("latin-1"))
        self.transport.sendto(data[::-1], address)  # type: ignore[attr-defined]


async def main() -> None:
    global log_file
    log_file = open(sys.argv[1], "a")  # noqa: SIM115, ASYNC230
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2], sys.argv[3])
    context.set_alpn_protocols(["http/1.1"])
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    stranger.load_cert_chain(sys.argv[2].replace("certificate", "stranger"), sys.argv[3])

    def by_name(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        note(kind="tls", name=name)
        if name == "stranger.test":
            connection.context = stranger

    context.sni_callback = by_name
    root = Path(sys.argv[4]).resolve()

    async def serve_web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await web(reader, writer, root)

    loop = asyncio.get_running_loop()
    for host in ("0.0.0.0", "::"):
        await asyncio.start_server(serve_web, host, 80)
        await asyncio.start_server(serve_web, host, 8080)
        await asyncio.start_server(serve_web, host, 443, ssl=context)
        await asyncio.start_server(banner, host, 22)
        await asyncio.start_server(banner, host, 5432)
    for address in (EVIL, WEB):
        await loop.create_datagram_endpoint(Dns, (address, 53))
        for port in (443, 9999):
            await loop.create_datagram_endpoint(Echo, (address, port))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
