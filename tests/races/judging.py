"""Comparing what engine, manager, journal and machine say of the sandboxes of an installation."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.layout import STARTING
from atoll.errors import SandboxError
from atoll.manager import SandboxManager
from atoll.model import State

_EXPECTED = {
    "SandboxGoneError",
    "SandboxNotFoundError",
    "SandboxPausedError",
    "ConflictError",
    "LimitReachedError",
    "CheckpointNotFoundError",
    "AgentUnreachableError",  # somebody killed the agent
}
_CONNECTED = "another client is connected"
"""Why memory is not saved just now."""
_DYING_S = 10.0
_LATER = 10
"""The lines after an answer in which a kill may be logged that came before it."""


@dataclass
class History:
    """What the drivers logged."""

    made: Counter[str] = field(default_factory=Counter)
    deleted: set[str] = field(default_factory=set)
    """Somebody was told that it is gone."""
    ending: set[str] = field(default_factory=set)
    """Somebody asked for that, and may not have been answered."""
    hit: set[str] = field(default_factory=set)
    """Somebody killed a process of it: a virtual kernel notices that its file server is dead when it needs that."""
    verbs: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, log: Path, killed: set[int]) -> History:
        """`killed` are the processes whose callers cannot have been answered."""
        history = cls()
        open_calls: dict[tuple[int, int], dict[str, Any]] = {}
        lines = log.read_text().splitlines() if log.exists() else []
        for number, line in enumerate(lines):
            entry = {**json.loads(line), "line": number}
            if "asked" in entry:
                open_calls[entry["by"], entry["asked"]] = entry
                history.verbs[entry["verb"]] += 1
                if entry["verb"] == "delete":
                    history.ending.add(entry["id"])
                elif entry["verb"] == "kill":
                    history.hit.add(entry["id"])
            elif "answered" in entry:
                asked = open_calls.pop((entry["by"], entry["answered"]))
                meanwhile = lines[asked["line"] : number + _LATER]
                history._answer(entry, any(_hits(json.loads(other), entry) for other in meanwhile))
            elif entry["failed"]:
                history.faults.append(f"could not be settled: {entry['failed']}")
        for (by, _), entry in open_calls.items():
            if by not in killed:
                history.faults.append(f"never answered: {entry}")
        history.faults += [f"{id} was made {times} times" for id, times in history.made.items() if times > 1]
        return history

    def _answer(self, entry: dict[str, Any], was_hit: bool) -> None:
        verb, error = entry["verb"], entry.get("error")
        self.slowest[verb] = max(self.slowest.get(verb, 0.0), entry["seconds"])
        self.outcomes[f"{verb}: {error or 'hung' if 'result' not in entry else 'done'}"] += 1
        if entry.get("hung"):
            self.faults.append(f"hung: {entry}")
        elif error == "EngineError" and (was_hit or _CONNECTED in entry["text"]):
            return
        elif entry.get("unexpected") or (error is not None and error not in _EXPECTED):
            self.faults.append(f"unexpected: {entry}")
        elif error is None and verb in ("create", "claim"):
            self.made[entry["result"]] += 1
        elif error is None and verb == "fork":
            self.made.update(entry["result"])
        elif error is None and verb == "delete" and entry["result"] is not False:
            self.deleted.add(entry["id"])


def _hits(other: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether a process of what was being started was killed on purpose. What is being made has an id yet unknown."""
    is_kill = other.get("verb") == "kill" and bool(other.get("result"))
    return is_kill and (entry["verb"] in ("create", "claim", "fork") or other["id"] == entry["id"])


async def compare(manager: SandboxManager, engine: LinuxEngine, history: History) -> list[str]:
    """What is lost, double or nobody's. The manager has just started and nothing else runs."""
    wiring = await manager._open()
    await wiring.orphans.collect()
    context, places = wiring.context, engine.layout
    members = {member.id: member for member in context.members}
    handles = [handle.sandbox_id for handle in await engine.list()]
    written = {record.id for record in (await context.journal.living())[0]}
    faults = [f"the engine lists {id} twice" for id, times in Counter(handles).items() if times > 1]
    faults += _differences("the engine has", set(handles), "the manager has", set(members))
    faults += _differences("the journal has", written, "the manager has", set(members))
    faults += [f"{id} was deleted and is there" for id in history.deleted & set(handles)]
    faults += [f"{id} is lost" for id in set(history.made) - history.ending - set(handles)]
    alive = {id for id, member in members.items() if member.record.state in (State.RUNNING, State.PAUSED)}
    faults += [f"{member.id} is {member.record.state}" for member in members.values() if member.record.act is not None]
    records = {id: places.records.read(id) for id in handles}
    asleep = {id for id, record in records.items() if record is not None and record.asleep}
    faults += _on_the_machine(engine, set(handles), alive - asleep)
    for id in sorted(alive):
        try:
            if members[id].record.state is State.PAUSED:  # by a driver, so no use wakes it
                await manager.resume_sandbox(id)
            said = (await members[id].sandbox.exec("echo here", timeout=60)).stdout
        except SandboxError as error:
            said = f"{error}"
        if said != "here\n" and id not in history.hit:
            faults.append(f"{id} says {said!r}")
    claimed = Counter(places.ids.owners().values())
    faults += [f"{id} has {times} ranges of ids" for id, times in claimed.items() if times > 1]
    return faults


def _on_the_machine(engine: LinuxEngine, known: set[str], alive: set[str]) -> list[str]:
    places = engine.layout
    groups = {name.removeprefix(STARTING) for name in places.accounts.names()}
    layers, ids = set(places.layers.list()), set(places.ids.owners().values())
    saved = {state.sandbox_id for state in engine._storage.records.all() if state.sandbox_id}
    running, deadline = {id for id in known if places.group(id).pids()}, time.monotonic() + _DYING_S
    while running - alive and time.monotonic() < deadline:
        # The kernel takes a moment to kill the rest of a sandbox whose first process has ended.
        running = {id for id in running if places.group(id).pids()}
    faults = [
        f"{what} of {id}, which is nobody" for what, found in _named(groups, layers, ids, saved) for id in found - known
    ]
    faults += [f"{id} lives without {what}" for what, found in _named(groups, layers, ids) for id in alive - found]
    faults += [f"{id} has no process" for id in alive - running]
    faults += [f"{id} has processes and is no more" for id in running - alive]
    return faults


def _named(*found: set[str]) -> list[tuple[str, set[str]]]:
    return list(zip(("a control group", "a layer", "a range of ids", "a checkpoint"), found, strict=False))


def _differences(first: str, one: set[str], second: str, other: set[str]) -> list[str]:
    return [f"{first} {id}, not so: {second}" for id in one - other] + [
        f"{second} {id}, not so: {first}" for id in other - one
    ]
