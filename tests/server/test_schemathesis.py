"""Random requests made from openapi.json: no answer is a server error, none breaks its own schema."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from server.conftest import Person
from server.running import SCHEMA, RunningServer

PORTS = [f"port_{method}" for method in ("get", "head", "post", "put", "patch", "delete", "options")]
schema = schemathesis.openapi.from_dict(SCHEMA).exclude(
    operation_id=["stream_events", "watch_files", "follow_command", "delete_sandbox", *PORTS]
)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
QUICK = settings(
    max_examples=int(os.environ.get("ATOLL_EXAMPLES", "2")),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.mark.filterwarnings("default")
@schema.parametrize()
@QUICK
def test_random_requests(
    case: schemathesis.Case[Any], server: RunningServer, schema_user: Person, schema_sandbox: str
) -> None:
    if "sandbox_id" in (case.path_parameters or {}):
        case.path_parameters["sandbox_id"] = schema_sandbox  # a random one only ever leads to 404
    response = case.call(base_url=server.url, headers={"Authorization": f"Bearer {schema_user.key}"}, timeout=30)
    case.validate_response(response, checks=CHECKS)
