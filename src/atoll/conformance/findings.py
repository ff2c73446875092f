"""How a check says what it found: sentences, also where assertions are optimised away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
_PAUSE_S = 0.02
_SHOWN = 300


class SkippedError(Exception):
    """The check cannot be made here, and why."""


def must(condition: object, sentence: str) -> None:
    """The sentence says what is wrong when the condition does not hold."""
    if not condition:
        raise AssertionError(sentence)


def must_equal(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what} should be {_short(expected)}, but is {_short(found)}")


async def refusal(attempt: Awaitable[object], kind: type[E] | tuple[type[E], ...], what: str) -> E:
    """The error of that kind that the attempt ends with. It is an error of the engine if it ends well."""
    try:
        outcome = await attempt
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what} should raise {_names(kind)}, but raised {error!r}") from error
    raise AssertionError(f"{what} should raise {_names(kind)}, but gave {_short(outcome)}")


async def until(condition: Callable[[], Awaitable[object]], sentence: str, within_s: float = 15.0) -> None:
    """Wait for a condition. The sentence says what is wrong when it does not come."""
    try:
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError as error:
        raise AssertionError(f"{sentence}, also after {within_s:g} s") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _names(kind: type[BaseException] | tuple[type[BaseException], ...]) -> str:
    return " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
