"""Finding a sandbox by what its owner calls it: its name, or the id of the task that it was made for."""

from __future__ import annotations

from atoll.errors import ConflictError
from atoll.manager.members import Member, Members
from atoll.manus import TASK_LABEL

_SHOWN = 5


def called(members: Members, text: str, owner: str | None) -> Member | None:
    """The sandbox of this owner, and of nobody else, that has this name, else the one of this task. Raises
    ConflictError if the task has several."""
    named = members.named(owner, text)
    if named is not None and _is_there(named):
        return named
    of_task = [
        member
        for member in members
        if member.record.owner == owner and member.record.labels.get(TASK_LABEL) == text and _is_there(member)
    ]
    if len(of_task) > 1:
        ids = ", ".join(member.id for member in of_task[:_SHOWN])
        raise ConflictError(f"task {text!r} has {len(of_task)} sandboxes", hint=f"Name one by its id: {ids}.")
    return of_task[0] if of_task else None


def _is_there(member: Member) -> bool:
    return not member.doomed and not member.waits_in_pool
