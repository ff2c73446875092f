"""Random requests made from openapi.json: no answer is a server error, none breaks its own schema.

Every operation is asked. Those that never end are read until their first byte; what a port answers is up to the
sandbox, so there only the server's own failures count.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.result import Ok
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test

from server.conftest import Person
from server.running import SCHEMA, RunningServer

ENDLESS = frozenset(("stream_events", "watch_files", "follow_command"))
"""They go on for as long as somebody reads. A command of their own would end, but random ids name none."""
schema = schemathesis.openapi.from_dict(SCHEMA)
OPERATIONS = {
    str(found.ok().definition.raw["operationId"]): found.ok()
    for found in schema.get_all_operations()
    if isinstance(found, Ok)
}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
QUICK = settings(
    max_examples=int(os.environ.get("ATOLL_EXAMPLES", "2")),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)


@schemathesis.serializer("application/x-tar")
def as_it_is(_: object, value: object) -> bytes:
    """Whatever was made up, which is hardly ever an archive."""
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


def test_every_operation_is_asked() -> None:
    """So that leaving one out is a decision that somebody sees."""
    known = {found["operationId"] for path in SCHEMA["paths"].values() for found in path.values()}
    assert set(OPERATIONS) == known
    assert known >= ENDLESS


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_random_requests(operation: str, server: RunningServer, schema_user: Person, schema_sandbox: str) -> None:
    """Requests are made up here: `schema.parametrize` makes up those of all operations whenever tests are collected."""
    headers = {"Authorization": f"Bearer {schema_user.key}"}

    @QUICK
    def ask(case: schemathesis.Case[Any]) -> None:
        if "sandbox_id" in (case.path_parameters or {}):
            # A random one only ever leads to 404. One that is to be deleted is made for it.
            case.path_parameters["sandbox_id"] = (
                schema_sandbox if operation != "delete_sandbox" else fresh(server, headers)
            )
        if operation in ENDLESS:
            first_byte(case, server, headers)
            return
        response = case.call(base_url=server.url, headers=headers, timeout=30)
        is_port = "/ports/" in case.operation.path
        case.validate_response(response, checks=[not_a_server_error] if is_port else CHECKS)

    build_operation_test(
        config=schema.config,
        operation=OPERATIONS[operation],
        test_func=ask,
        given_kwargs={},
        feedback=FeedbackSources(),
    )()


def fresh(server: RunningServer, headers: dict[str, str]) -> str:
    made = httpx.post(f"{server.url}/api/v1/sandboxes", headers=headers, timeout=30, trust_env=False)
    return str(made.json()["id"]) if made.is_success else "no-room"


def first_byte(case: schemathesis.Case[Any], server: RunningServer, headers: dict[str, str]) -> None:
    wanted = case.as_transport_kwargs(base_url=server.url, headers=headers)
    options = {name: wanted[name] for name in ("params", "headers", "cookies") if wanted.get(name)}
    with httpx.stream(wanted["method"], wanted["url"], timeout=30, trust_env=False, **options) as response:
        if wanted["method"].upper() != case.operation.method.upper():
            assert response.status_code == 405
            return
        promised = case.operation.definition.raw["responses"]
        assert str(response.status_code) in promised, response.status_code
        assert response.status_code < 500
        kind = response.headers["content-type"].partition(";")[0]
        assert kind in promised[str(response.status_code)]["content"]
        if response.status_code == 200 and case.operation.definition.raw["operationId"] != "stream_events":
            assert next(response.iter_bytes())  # of events there may be none
