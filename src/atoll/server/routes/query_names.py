"""Parameters in queries that a route does not know are refused, as are unknown names in bodies. Otherwise a misspelt
filter would silently select everything."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

from atoll.errors import SpecError
from atoll.model.spelling import nearest

_SHOWN = 80
_known: dict[str, frozenset[str]] = {}
"""The parameters of routes, by the id of the operation, which is fixed in the sources."""


async def refuse_unknown_parameters(connection: HTTPConnection) -> None:
    """Raise SpecError for a parameter that the route does not know. Requests that are passed on to a port may have
    any."""
    route = connection.scope.get("route")
    if not isinstance(route, APIRoute) or not route.include_in_schema:
        return
    known = _parameters(route)
    for name in connection.query_params:
        if name not in known:
            meant = nearest(name, known)
            hint = f"Did you mean {meant!r}?" if meant else _listed(known)
            raise SpecError(f"{name[:_SHOWN]!r} is not a parameter of this request", hint=hint)


def _listed(known: frozenset[str]) -> str:
    return f"There are {', '.join(sorted(known))}." if known else "It has none."


def _parameters(route: APIRoute) -> frozenset[str]:
    name = route.unique_id
    if name not in _known:
        _known[name] = frozenset(_names(route.dependant))
    return _known[name]


def _names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for each in dependant.dependencies:
        yield from _names(each)
