"""The tree of errors on top of `atoll.errors` is the truth: about every error of Atoll, wherever it is raised."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re

import pytest

import atoll
from atoll import errors
from atoll.engines.remote.rest_client import error_of
from atoll.errors import (
    BuildError,
    EngineError,
    ForbiddenError,
    NotAuthenticatedError,
    OperationError,
    RateLimitedError,
    SandboxError,
    SandboxGoneError,
    SetupError,
    ToolError,
)
from atoll.server import problems

_LINE = re.compile(r"^(?P<branch>[│ ]*[├└]── )?(?P<name>\w+Error) +(?P<meaning>\S.*)$", re.MULTILINE)
_BUILT_IN = re.compile(r"\(also an? (\w+)\)")
OF_PROGRAMS = (OperationError, ToolError)
"""What only the classes of `atoll.openmanus` raise, which no server has."""


def kinds(kind: type[SandboxError] = SandboxError) -> list[type[SandboxError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in kinds(child))]


def drawn() -> dict[str, tuple[str | None, str]]:
    """The parent and the meaning of each error in the tree, by name."""
    found: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    for line in _LINE.finditer(errors.__doc__ or ""):
        path[len(line["branch"] or "") // 4 :] = [line["name"]]
        found[line["name"]] = (path[-2] if len(path) > 1 else None, line["meaning"])
    return found


every_kind = pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.__name__) for kind in kinds()])


def test_there_is_no_error_outside_of_the_tree() -> None:
    """Every module is imported, so that none defines an error of its own."""
    for module in pkgutil.walk_packages(atoll.__path__, "atoll."):
        if not module.name.endswith(".__main__") and ".migrations." not in module.name:
            importlib.import_module(module.name)
    assert {kind.__module__ for kind in kinds()} == {"atoll.errors"}
    assert set(drawn()) == {kind.__name__ for kind in kinds()}


@every_kind
def test_its_place_and_its_meaning_are_in_the_tree(kind: type[SandboxError]) -> None:
    parent, meaning = drawn()[kind.__name__]
    bases = [base.__name__ for base in kind.__bases__]
    assert bases[0] == parent or kind is SandboxError
    built_in = _BUILT_IN.search(meaning)
    assert bases[1:] == ([built_in[1]] if built_in else [])


@every_kind
def test_it_is_exported(kind: type[SandboxError]) -> None:
    assert kind.__name__ in atoll.__all__
    assert getattr(atoll, kind.__name__) is kind


@every_kind
def test_its_code_is_its_own(kind: type[SandboxError]) -> None:
    assert "code" in vars(kind)
    assert [other for other in kinds() if other.code == kind.code] == [kind]
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)


@every_kind
def test_a_client_raises_what_the_server_met(kind: type[SandboxError]) -> None:
    """With what it says about it: the reason, the hint, the cause, the output."""
    answer = problems.respond(kind("too bad", hint="do better"))
    again = error_of(answer.status_code, bytes(answer.body), answer.headers.get("Retry-After"))
    assert type(again) is kind
    assert again.from_server
    assert "too bad" in again.reason
    if kind is not NotAuthenticatedError:  # the server does not know where the client's key comes from
        assert (again.reason, again.hint) == ("too bad", "do better")


@every_kind
def test_its_status_says_what_to_do(kind: type[SandboxError]) -> None:
    status = problems.of(kind("too bad")).status
    if kind is SandboxError or issubclass(kind, OF_PROGRAMS):
        assert status == 500
    else:
        assert status in (401, 403, 404, 409, 410, 422, 429, 503, 504, 507)
        assert f"{status}" in {str(known) for known in problems.RESPONSES}
    assert (status == 404) == (kind.__name__.endswith("NotFoundError") and status not in (422, 503))


def test_what_an_error_carries_comes_along() -> None:
    for error in (
        SandboxGoneError("ended", cause="out_of_memory"),
        SetupError("failed", output="the end of it"),
        BuildError("failed", step=3, place="Dockerfile:7", instruction="RUN x", exit_code=2, cause="exit", output="no"),
        RateLimitedError("slowly", retry_after_s=7.0),
    ):
        answer = problems.respond(error)
        again = error_of(answer.status_code, bytes(answer.body), answer.headers.get("Retry-After"))
        assert {**vars(again), "from_server": False} == {**vars(error), "from_server": False}


@pytest.mark.parametrize("kind", [NotAuthenticatedError, ForbiddenError, RateLimitedError])
def test_what_a_server_behind_a_server_refuses_is_not_the_callers_fault(kind: type[SandboxError]) -> None:
    """Its credential is that of the server in front."""
    far = problems.respond(kind("too bad"))
    near = problems.respond(error_of(far.status_code, bytes(far.body)))
    assert near.status_code == 503
    assert json.loads(bytes(near.body))["code"] == EngineError.code
