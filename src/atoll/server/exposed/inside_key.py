"""Session keys on their way inside: ours stay outside, and what listens there gets the key that it knows instead.

OpenHands's agent server knows its callers by the key in its environment, sent as a header or, by browsers that open a
WebSocket, in the query.
"""

from __future__ import annotations

import dataclasses
import re

from starlette.requests import HTTPConnection

from atoll.server.auth import SESSION_HEADER, services_of
from atoll.server.exposed.way import Way

_IN_QUERY = re.compile(rb"(?<=[?&]session_api_key=)[A-Za-z0-9_.-]{1,512}(?=&|$)")


async def with_inside_key(connection: HTTPConnection, way: Way) -> Way:
    """The same way, with the sandbox's own key in place of a valid session key of ours."""
    callbacks = services_of(connection).sandboxes.callbacks
    sent = connection.headers.get(SESSION_HEADER)
    key = await callbacks.key_inside(way.sandbox_id, sent) if sent else None
    found = _IN_QUERY.search(way.target)
    in_query = await callbacks.key_inside(way.sandbox_id, found[0].decode()) if found else None
    target = _IN_QUERY.sub(in_query.encode(), way.target, count=1) if in_query else way.target
    return dataclasses.replace(way, target=target, session_key=key or "") if key or in_query else way
