"""Runs a property on generated input: a few fixed examples in every run of the tests, and many random ones in the slow
run. What the slow run finds is printed as the smallest input that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import DrawFn, SearchStrategy, composite, integers, sampled_from

_LONGER = 150

runs = pytest.mark.parametrize(
    "times",
    [
        pytest.param(1, id="fixed"),
        pytest.param(_LONGER, id="random", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
"""Marks a test that passes its argument `times` on to `explore`."""


def explore(check: Callable[..., None], *inputs: SearchStrategy[Any], examples: int, times: int) -> None:
    """Check that a property holds for `examples` inputs, or for `times` as many random ones."""
    chosen = settings(
        max_examples=examples * times,
        derandomize=times == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    chosen(given(*inputs)(check))()


@composite
def mutated(draw: DrawFn, original: SearchStrategy[bytes], tokens: SearchStrategy[bytes]) -> bytes:
    """Byte strings with one to four changes. Each replaces, inserts, removes, repeats or moves a short piece."""
    data = draw(original)
    for _ in range(draw(integers(1, 4))):
        at = draw(integers(0, len(data)))
        length = draw(sampled_from((0, 1, 1, 2, 4, 16)))
        before, piece, after = data[:at], data[at : at + length], data[at + length :]
        match draw(sampled_from(("replace", "replace", "remove", "repeat", "move", "flip"))):
            case "replace":
                piece = draw(tokens)
            case "remove":
                piece = b""
            case "repeat":
                piece *= 2
            case "move":
                to = draw(integers(0, len(before)))
                before, piece = before[:to] + piece + before[to:], b""
            case "flip":
                piece = bytes(byte ^ 1 << draw(integers(0, 7)) for byte in piece)
        data = before + piece + after
    return data
