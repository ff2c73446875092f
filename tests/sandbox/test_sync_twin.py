"""The synchronous classes offer exactly what the asynchronous ones do."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll.guest.files import AsyncWatch
from atoll.guest.port_streams import AsyncPortStream
from atoll.sandbox.on_class import OnClassToo

TWINS = [
    (atoll.AsyncSandbox, atoll.Sandbox),
    (atoll.AsyncCommand, atoll.Command),
    (atoll.AsyncShell, atoll.Shell),
    (atoll.AsyncTerminal, atoll.Terminal),
    (AsyncWatch, atoll.Watch),
    (AsyncPortStream, atoll.PortStream),
]
RENAMED = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
}


def offered(cls: type) -> dict[str, object]:
    """What the class and the parts that it is made of define."""
    found = {name: value for base in reversed(cls.__mro__[:-1]) for name, value in vars(base).items()}
    return {name: value for name, value in found.items() if not name.startswith("_") or name in RENAMED}


@pytest.mark.parametrize(("original", "twin"), TWINS, ids=[twin.__name__ for _, twin in TWINS])
def test_the_twin_has_every_method_with_the_same_parameters(original: type, twin: type) -> None:
    for name, value in offered(original).items():
        other = inspect.getattr_static(twin, RENAMED.get(name, name), None)
        assert other is not None, f"{twin.__name__} has no {name}"
        if isinstance(value, property):
            assert isinstance(other, property), name
            continue
        if isinstance(value, OnClassToo):
            assert isinstance(other, OnClassToo), name
            continue
        value, other = getattr(value, "__func__", value), getattr(other, "__func__", other)
        assert callable(value)
        assert callable(other)
        before, after = inspect.signature(value).parameters, inspect.signature(other).parameters
        assert [*before] == [*after], name
        for parameter in before:
            assert before[parameter].kind == after[parameter].kind, f"{name}({parameter})"
            assert before[parameter].default == after[parameter].default, f"{name}({parameter})"


@pytest.mark.parametrize(("original", "twin"), TWINS, ids=[twin.__name__ for _, twin in TWINS])
def test_the_twin_has_nothing_more_and_nothing_to_await(original: type, twin: type) -> None:
    known = {RENAMED.get(name, name) for name in offered(original)}
    for name, value in vars(twin).items():
        if name.startswith("_") and name not in RENAMED.values():
            continue
        if not isinstance(value, property):
            assert name in known, f"{twin.__name__}.{name} is not in {original.__name__}"
        assert not inspect.iscoroutinefunction(value), name
        assert not inspect.isasyncgenfunction(value), name


def test_constructors_are_alike() -> None:
    before, after = inspect.signature(atoll.AsyncSandbox), inspect.signature(atoll.Sandbox)
    assert before.parameters.keys() == after.parameters.keys()
    for name, parameter in before.parameters.items():
        assert parameter.default == after.parameters[name].default, name


def test_the_generated_file_is_current() -> None:
    script = Path(__file__).parents[2] / "scripts/generate_sync.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
