"""Command policies: functions of the program that are asked before a command runs. There is none by default.

A command policy is no protection: a program can do whatever the policy forbids in a way that the policy does not
recognise. The sandbox is the protection. A policy is useful to keep an agent from destroying its own work, to ask a
person before something slow or costly, or to log commands.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from atoll.errors import CommandRefusedError


class Answer(enum.StrEnum):
    ALLOW = "allow"
    REFUSE = "refuse"
    ASK = "ask"


@dataclass(frozen=True, slots=True)
class Verdict:
    answer: Answer
    reason: str = ""


ALLOW = Verdict(Answer.ALLOW)

Policy = Callable[[str], Verdict | Awaitable[Verdict]]
"""Given the command as it is written, says what to do with it."""
Asker = Callable[[str, str], bool | Awaitable[bool]]
"""Given the command and the question, says whether it may run."""


def refuse(reason: str) -> Verdict:
    """It does not run; the caller is told why."""
    return Verdict(Answer.REFUSE, reason)


def ask(question: str) -> Verdict:
    """Somebody decides. Without anybody to ask it is refused."""
    return Verdict(Answer.ASK, question)


async def apply(policy: Policy | None, asker: Asker | None, command: str) -> None:
    """Raises CommandRefusedError unless the command may run."""
    if policy is None:
        return
    found = policy(command)
    verdict = await found if inspect.isawaitable(found) else found
    if verdict.answer is Answer.ALLOW:
        return
    if verdict.answer is Answer.ASK and asker is not None:
        said = asker(command, verdict.reason)
        if await said if inspect.isawaitable(said) else said:
            return
    raise CommandRefusedError(f"Command refused: {verdict.reason or 'no reason given'}")
