"""`atoll ports`, `atoll expose`: what listens in a sandbox, and where it can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from atoll.cli.target import JsonOption, SandboxArgument, attach, print_json, server_url, show, the_server
from atoll.errors import SpecError

PortOption = Annotated[
    list[str] | None,
    typer.Option("--port", metavar="NAME=PORT", help="Expose a port on the server under a name; may be repeated."),
]


def ports(sandbox_id: SandboxArgument, as_json: JsonOption = False) -> None:
    """List what listens in a sandbox, with its process and, on a server, its URL."""

    async def work() -> list[dict[str, object]]:
        sandbox = await attach(sandbox_id)
        try:
            if server_url() is None:
                return [asdict(each) for each in await sandbox.ports()]
            server = the_server()
            id = sandbox._created().details.get("remote_id", sandbox.id)
            found = await server.call("GET", f"/sandboxes/{id}/ports")
            await server.aclose()
            return [{**each, "exposed": [url["host_url"] or url["url"] for url in each["exposed"]]} for each in found]
        finally:
            await sandbox.detach()

    show(asyncio.run(work()), as_json)


def expose(
    sandbox_id: SandboxArgument,
    port: Annotated[str, typer.Argument(help="PORT, or NAME=PORT.", metavar="[NAME=]PORT")],
    public: Annotated[bool, typer.Option("--public", help="Whoever has the URL reaches it.")] = False,
    lifetime: Annotated[int, typer.Option(help="Seconds that the link is good for.", min=1)] = 3600,
    as_json: JsonOption = False,
) -> None:
    """Expose a port of a sandbox on the server, and print a link to it."""
    name, number = named_port(port)

    async def work() -> None:
        server = the_server()
        try:
            path = f"/sandboxes/{sandbox_id}"
            body = {"name": name, "port": number, "public": public}
            made = await server.call("POST", f"{path}/ports", json=body)
            if not public:
                link = {"port": number, "lifetime_s": lifetime}
                made |= await server.call("POST", f"{path}/port-links", json=link)
        finally:
            await server.aclose()
        if as_json:
            print_json(made)
        else:
            print(made["host_url"] or made["url"])

    asyncio.run(work())


def named_port(text: str) -> tuple[str, int]:
    """`NAME=PORT`, or `PORT`, whose name is then `port-PORT`."""
    name, equals, number = text.rpartition("=")
    if not number.isascii() or not number.isdigit() or (equals and not name):
        raise SpecError(f"'{text}' is not a port", hint="Write NAME=PORT, for example WEB=8000.")
    return name or f"port-{number}", int(number)


def named_ports(texts: Sequence[str] | None) -> dict[str, int]:
    """As given with `--port`. SpecError without a server to expose them."""
    if texts and server_url() is None:
        raise SpecError("exposed ports need a server", hint="`atoll port-forward` gives a port of this machine.")
    return dict(named_port(text) for text in texts or ())
