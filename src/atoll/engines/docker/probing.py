"""Whether there is a Docker engine that sandboxes can run on."""

from __future__ import annotations

from atoll import agent_binary
from atoll.engines.availability import Availability
from atoll.engines.docker import endpoint, facts
from atoll.engines.docker.http import Http
from atoll.errors import EngineUnavailableError
from atoll.model import Capability

_CONTROLS = (Capability.MEMORY, Capability.CPUS, Capability.PIDS, Capability.DISK)


def probe(name: str, *, thorough: bool) -> Availability:
    """`thorough` asks the engine what it can do; otherwise only whether it answers."""
    try:
        agent_binary.path()
        http = Http(endpoint.find())
        if not thorough:
            facts.ping_now(http)
            return Availability(name, True)
        known = facts.learn_now(http)
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
