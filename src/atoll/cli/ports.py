"""`atoll ports`, `expose`, `port-forward`: what listens in a sandbox, and where it can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.target import JsonOption, SandboxArgument, on_sandbox, open_server, print_json, server_url, show
from atoll.errors import SpecError

if TYPE_CHECKING:
    from atoll.sandbox.sandbox import AsyncSandbox


def ports(sandbox_id: SandboxArgument, as_json: JsonOption = False) -> None:
    """List what listens in a sandbox, with its process and, on a server, its URL."""

    async def work(sandbox: AsyncSandbox) -> list[dict[str, object]]:
        if server_url() is None:
            return [asdict(each) for each in await sandbox.ports()]
        async with open_server() as server:
            found = await server.call("GET", f"/sandboxes/{sandbox.access.listed_id()}/ports")
        return [{**each, "exposed": [url["host_url"] or url["url"] for url in each["exposed"]]} for each in found]

    show(on_sandbox(sandbox_id, work), as_json)


def expose(
    sandbox_id: SandboxArgument,
    port: Annotated[str, typer.Argument(help="PORT, or NAME=PORT.", metavar="[NAME=]PORT")],
    public: Annotated[bool, typer.Option("--public", help="Let anybody who has the URL reach the port.")] = False,
    lifetime: Annotated[int, typer.Option(help="Seconds until the link expires.", min=1)] = 3600,
    as_json: JsonOption = False,
) -> None:
    """Expose a port of a sandbox on the server, and print a link to it."""
    name, number = named_port(port)

    async def work() -> None:
        async with open_server() as server:
            path = f"/sandboxes/{sandbox_id}"
            body = {"name": name, "port": number, "public": public}
            made = await server.call("POST", f"{path}/ports", json=body)
            if not public:
                link = {"port": number, "lifetime_s": lifetime}
                made |= await server.call("POST", f"{path}/port-links", json=link)
        if as_json:
            print_json(made)
        else:
            print(made["host_url"] or made["url"])

    asyncio.run(work())


def port_forward(
    sandbox_id: SandboxArgument,
    ports: Annotated[
        str, typer.Argument(help="LOCAL:PORT, or PORT for the same number on both sides.", metavar="LOCAL:PORT")
    ],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
) -> None:
    """Forward a local port to a port in the sandbox, until Ctrl-C. The sandbox needs no network."""
    local, _, inside = ports.rpartition(":")
    if not inside.isdigit() or not (local or inside).isdigit():
        raise SpecError(f"'{ports}' are not ports", hint="Write LOCAL:PORT, for example 8080:80.")

    async def work(sandbox: AsyncSandbox) -> None:
        async with await sandbox.expose(int(inside), int(local or inside), host=host) as forward:
            print(f"{forward.address[0]}:{forward.address[1]} -> {inside}", flush=True)
            await asyncio.Event().wait()

    try:
        on_sandbox(sandbox_id, work)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def named_port(text: str) -> tuple[str, int]:
    """Parse `NAME=PORT`, or `PORT` alone, whose name is then `port-PORT`."""
    name, equals, number = text.rpartition("=")
    if not number.isascii() or not number.isdigit() or (equals and not name):
        raise SpecError(f"'{text}' is not a port", hint="Write NAME=PORT, for example WEB=8000.")
    return name or f"port-{number}", int(number)


def named_ports(texts: Sequence[str] | None) -> dict[str, int]:
    """Parse the values of `--port`. Raises SpecError if there is no server to expose them."""
    if texts and server_url() is None:
        raise SpecError("exposed ports need a server", hint="Without a server, use `atoll port-forward`.")
    return dict(named_port(text) for text in texts or ())
