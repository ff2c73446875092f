"""`atoll key`: API keys of a server."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli.target import JsonOption, ask_server, list_from_server, print_json, show

app = typer.Typer(help="API keys of a server.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls")
def list_keys(as_json: JsonOption = False) -> None:
    """List API keys without their secrets."""
    show(list_from_server("/keys"), as_json)


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="A name to recognize the key by.")],
    user: Annotated[str | None, typer.Option(help="The user whom the key is for; only for administrators.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="A scope of the key; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Create an API key and print it. It is not shown again."""
    body = {"name": name, **({"user_id": user} if user else {}), **({"scopes": scope} if scope else {})}
    made = ask_server("POST", "/keys", safe=False, json=body)
    if as_json:
        print_json(made)
    else:
        print(made["key"])


@app.command("revoke")
def revoke_key(id: Annotated[str, typer.Argument(help="The id of the key; `atoll key ls` lists them.")]) -> None:
    """Revoke an API key."""
    ask_server("DELETE", f"/keys/{id}", safe=False)
    print(id)
