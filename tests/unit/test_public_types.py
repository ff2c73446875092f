"""Every type that a program meets in what it is given can be imported from `atoll`."""

from __future__ import annotations

import inspect
import typing
import warnings
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

import atoll

_NOT_FOR_USERS = {"access", "supervisor", "metric_families"}


def _named(annotation: object) -> Iterator[type]:
    """The classes of ours in an annotation."""
    if isinstance(annotation, type) and annotation.__module__.startswith("atoll."):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _named(part)


def _given(cls: type) -> Iterator[tuple[str, object]]:
    """What methods and fields of a class give out."""
    for name in dir(cls):
        if name.startswith("_") or name in _NOT_FOR_USERS or name in dir(BaseModel):
            continue
        found = inspect.getattr_static(cls, name)
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if inspect.isfunction(found):
            yield name, typing.get_type_hints(found).get("return")
    for name, annotation in typing.get_type_hints(cls).items():
        if not name.startswith("_") and name not in _NOT_FOR_USERS:
            yield name, annotation


def test_every_type_that_a_method_returns_is_public() -> None:
    public = {name: getattr(atoll, name) for name in atoll.__all__}
    waiting = [value for value in public.values() if isinstance(value, type)]
    seen: set[type] = set()
    missing: dict[str, str] = {}
    while waiting:
        cls = waiting.pop()
        if cls in seen:
            continue
        seen.add(cls)
        for member, annotation in _given(cls):
            for found in _named(annotation):
                waiting.append(found)
                if public.get(found.__name__) is not found:
                    missing[f"{found.__module__}.{found.__name__}"] = f"{cls.__name__}.{member}"
    assert not missing, "not in atoll.EXPORTS, but given to programs"
    assert len(seen) > 40


@pytest.mark.parametrize(("retired", "current"), atoll.RETIRED.items())
def test_a_retired_name_works_and_says_what_has_taken_its_place(retired: str, current: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"atoll.{current} now"):
        assert getattr(atoll, retired) is getattr(atoll, current)


def test_public_names_bring_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(hasattr(atoll, name) for name in atoll.__all__)
