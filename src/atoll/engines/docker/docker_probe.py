"""Checks whether there is a Docker engine that sandboxes can run on.

A probe is synchronous: it is called from threads and from programs without an event loop, never from an event loop. So
it may wait for the Docker engine, in an event loop of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from threading import Thread
from typing import Any, TypeVar

from atoll import agent_binary
from atoll.engines.availability import Availability
from atoll.engines.docker.api import endpoint, facts
from atoll.engines.docker.api.http import QUICK_S, Http, RefusedError
from atoll.errors import EngineUnavailableError
from atoll.model import Capability

T = TypeVar("T")
_CONTROLS = (Capability.MEMORY, Capability.CPUS, Capability.PIDS, Capability.DISK)


def probe(name: str, *, thorough: bool) -> Availability:
    """Find out what the Docker engine can do or, unless `thorough`, only whether it answers."""
    try:
        agent_binary.path()
        http = Http(endpoint.find())
        if not thorough:
            _finished(_ping(http))
            return Availability(name, True)
        known = _finished(facts.learn(http))
        known.require_usable()
    except EngineUnavailableError as error:
        return Availability(name, False, (error.reason,), ((error.hint,) if error.hint else ()))
    missing = [capability.value for capability in _CONTROLS if capability not in known.capabilities]
    reasons = [f"engine at {http.endpoint}, runtimes {', '.join(sorted(known.runtimes))}"]
    if missing:
        reasons.append(f"it cannot limit {', '.join(missing)}: sandboxes that ask for that are refused")
        reasons += known.problems.values()
    if not known.user_namespace:
        reasons.append("it has no user namespace, so root in a sandbox has the host's own user id; see 'userns-remap'")
    return Availability(name, True, tuple(reasons), version=known.version)


async def _ping(http: Http) -> None:
    try:
        await http.raw("GET", "/_ping", timeout_s=QUICK_S)
    except RefusedError as error:
        raise EngineUnavailableError(f"the Docker engine at {http.endpoint} does not work: {error.message}") from error


def _finished(work: Coroutine[Any, Any, T]) -> T:
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:
            outcome.append(error)

    thread = Thread(target=run, name="atoll-docker")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
