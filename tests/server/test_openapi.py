"""What openapi.json says is enough to use the API: everything in it has a text of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from atoll.server.app import bare_app
from atoll.server.routes import ROUTERS, runtime

DOCUMENT = bare_app().openapi()
ROUTES = [
    route
    for router in (*ROUTERS, runtime.router)
    for route in router.routes
    if isinstance(route, APIRoute) and route.include_in_schema
]


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for methods in DOCUMENT["paths"].values():
        for operation in methods.values():
            yield operation["operationId"], operation


@pytest.mark.parametrize(("name", "operation"), list(operations()))
def test_every_operation_and_parameter_is_described(name: str, operation: dict[str, Any]) -> None:
    assert not operation["summary"].endswith(".")
    assert operation["description"].endswith(".")
    assert operation["description"].rstrip(".") != operation["summary"]
    for parameter in operation.get("parameters", []):
        assert parameter.get("description", "").endswith("."), parameter["name"]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation_id)
def test_no_summary_is_the_name_of_a_function(route: APIRoute) -> None:
    """FastAPI writes one where a route has none."""
    assert route.summary
    assert " " in route.summary
    assert route.summary.lower().split() != route.endpoint.__name__.lower().split("_")


def test_every_operation_is_looked_at() -> None:
    assert len(ROUTES) == len(list(operations())) > 50


def test_no_two_operations_have_the_same_summary() -> None:
    summaries = [operation["summary"] for _, operation in operations()]
    assert len(set(summaries)) == len(summaries)


@pytest.mark.parametrize("name", sorted(DOCUMENT["components"]["schemas"]))
def test_every_schema_and_field_is_described(name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    assert schema.get("description"), name
    for field, described in schema.get("properties", {}).items():
        assert described.get("description", "").rstrip().endswith((".", "`")), field
