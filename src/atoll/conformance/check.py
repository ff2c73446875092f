"""What a check is, how it is entered into the list of all, and how it reports what it found."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from atoll.conformance.bench import Bench
from atoll.model import Capability

CheckFunction = Callable[[Bench], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One promise that an engine has to keep. It fails by an AssertionError that says what was seen instead."""

    name: str
    """Where it is and what it promises: `commands.exit_codes_are_reported`."""
    promise: str
    function: CheckFunction
    needs: frozenset[Capability]
    """It is asked only of engines that declare all of these."""
    without: frozenset[Capability]
    """It is asked only of engines that declare none of these."""
    slow: bool

    def unfit(self, capabilities: frozenset[Capability]) -> str | None:
        """Why it is not asked of an engine with these capabilities; None if it is."""
        if missing := self.needs - capabilities:
            return f"the engine does not declare {', '.join(sorted(missing))}"
        if present := self.without & capabilities:
            return f"the engine declares {', '.join(sorted(present))}"
        return None


CHECKS: list[Check] = []
"""All of them, in the order in which they are best read."""


def check(
    *, needs: Collection[Capability] = (), without: Collection[Capability] = (), slow: bool = False
) -> Callable[[CheckFunction], CheckFunction]:
    """Enter a function into the list. Its name and its docstring are the promise."""

    def enter(function: CheckFunction) -> CheckFunction:
        module = function.__module__.rpartition(".")[2]
        CHECKS.append(
            Check(
                name=f"{module}.{getattr(function, '__name__', 'unnamed')}",
                promise=inspect.getdoc(function) or "",
                function=function,
                needs=frozenset(needs),
                without=frozenset(without),
                slow=slow,
            )
        )
        return function

    return enter


E = TypeVar("E", bound=BaseException)
_PAUSE_S = 0.02
_SHOWN = 300


class SkippedError(Exception):
    """The check cannot be made here; the message says why."""


def must(condition: object, sentence: str) -> None:
    """Fail with this sentence unless the condition holds, also where assertions are optimised away."""
    if not condition:
        raise AssertionError(sentence)


def must_equal(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what} should be {_short(expected)}, but is {_short(found)}")


async def refusal(attempt: Awaitable[object], kind: type[E] | tuple[type[E], ...], what: str) -> E:
    """Return the error that the attempt ends with. The check fails if the attempt succeeds or raises another kind."""
    try:
        outcome = await attempt
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what} should raise {_names(kind)}, but raised {error!r}") from error
    raise AssertionError(f"{what} should raise {_names(kind)}, but gave {_short(outcome)}")


async def until(condition: Callable[[], Awaitable[object]], sentence: str, within_s: float = 15.0) -> None:
    """Wait for a condition, and fail with this sentence if it does not come true in time."""
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
