"""`atoll serve`, `atoll config`: sandboxes for many users, over HTTP."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.target import JsonOption, print_json, show
from atoll.errors import EngineUnavailableError, SandboxError

if TYPE_CHECKING:
    from atoll.server.settings import ServerSettings


def serve(
    host: Annotated[str | None, typer.Option(help="The address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on; 0: any free port.")] = None,
    engine: Annotated[str | None, typer.Option(help="The engine that makes the sandboxes; see `atoll config`.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file; see `atoll config`.")] = None,
) -> None:
    """Serve sandboxes over HTTP until SIGTERM. State is kept in ATOLL_STATE_DIR."""
    settings = _settings(config, host=host, port=port, engine=engine)
    with _listen(settings.host, settings.port) as sock:
        try:
            from atoll.server.serve import serve as run
        except ImportError as error:
            raise _missing(error) from error
        run(settings, sock, _ready)


def config(
    as_json: JsonOption = False,
    file: Annotated[Path | None, typer.Option("--config", help="The TOML file to read.")] = None,
) -> None:
    """Show every setting of `atoll serve`: its value here, where the value comes from, and how to set it."""
    settings = _settings(file)
    for warning in settings.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    values = json.loads(settings.model_dump_json())
    values["database_url"] = _without_password(values["database_url"])
    if as_json:
        print_json(values)
        return
    show(
        [
            {
                "setting": name,
                "value": values[name],
                "from": "environment" if settings.origin(name) == variable else settings.origin(name),
                "variable": variable,
                "meaning": field.description,
            }
            for name, field in type(settings).model_fields.items()
            if (variable := f"ATOLL_{name.upper()}")
        ],
        False,
    )


def _settings(file: Path | None, **given: Any) -> ServerSettings:
    try:
        from atoll.server.settings import ServerSettings
    except ImportError as error:
        raise _missing(error) from error
    return ServerSettings.load(file=file, **given)


def _without_password(url: str | None) -> str | None:
    """Return the URL of a database as it may be shown."""
    return None if url is None else re.sub(r"(?<=://)([^:@/]*):.*@", r"\1:***@", url)


def _missing(error: ImportError) -> EngineUnavailableError:
    return EngineUnavailableError(f"the server needs more packages: {error}", hint="pip install 'atoll[server]'")


def _ready(url: str, first_key: str | None) -> None:
    print(f"Atoll listens on {url}", flush=True)
    if first_key is None:
        return
    print(
        f"\nThis is the first run. The administrator's key, shown only now:\n\n    {first_key}\n\n"
        f"To use it:\n\n    export ATOLL_URL={url} ATOLL_API_KEY={first_key}\n",
        flush=True,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Listen before anything else is loaded: clients that connect meanwhile wait. Raises SandboxError if the address is
    taken."""
    from atoll.server.connections.vanished_clients import probe_idle

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe_idle(sock)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise SandboxError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="Choose another with --port."
        ) from error
    return sock
