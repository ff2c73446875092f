"""The server's own answers on exposed ports: a page for a browser, one line of text for other clients."""

from __future__ import annotations

import html
from collections.abc import Mapping

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response

_AGAIN_S = 2
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>{head}
<meta name="viewport" content="width=device-width"><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 36em; margin: 15vh auto; padding: 0 1em; }}
p {{ color: #555; }}
</style></head><body><h1>{title}</h1><p>{text}</p></body></html>
"""


def page(
    connection: HTTPConnection,
    status: int,
    title: str,
    text: str = "",
    *,
    again: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return such an answer. With `again` a browser reloads it by itself, so that it shows what opens later."""
    more = {"Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'"}
    more |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})}
    if "text/html" not in connection.headers.get("accept", ""):
        return PlainTextResponse(f"{title}: {text}\n" if text else f"{title}\n", status, more)
    head = f'<meta http-equiv="refresh" content="{_AGAIN_S}">' if again else ""
    body = _PAGE.format(title=html.escape(title), text=html.escape(text), head=head)
    return HTMLResponse(body, status, more)
