"""Our seccomp profile in the format that the Docker API takes, which is nearly that of an OCI bundle."""

from __future__ import annotations

import functools
import json
from typing import Any

from atoll.engines.host.confinement.seccomp import Match, Rule, profile

ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}


@functools.cache
def rendered(architecture: str, *, refuses_set_id: bool = False) -> str:
    """For an engine on machines of this architecture, as `uname -m` names it. `refuses_set_id`: no file becomes
    set-uid, because it could be one of the host's."""
    chosen = profile("refused" if refuses_set_id else "allowed")
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "defaultErrnoRet": chosen.default_error,
            "architectures": [ARCHITECTURES[architecture]],
            "syscalls": [_rule(rule) for rule in chosen.rules],
        },
        separators=(",", ":"),
    )


def _rule(rule: Rule) -> dict[str, Any]:
    found: dict[str, Any] = {"names": list(rule.names), "action": "SCMP_ACT_ALLOW"}
    if rule.error is not None:
        found |= {"action": "SCMP_ACT_ERRNO", "errnoRet": rule.error}
    if rule.matches:
        found["args"] = [_match(match) for match in rule.matches]
    return found


def _match(match: Match) -> dict[str, Any]:
    return {"index": match.index, "value": match.mask, "valueTwo": match.value, "op": "SCMP_CMP_MASKED_EQ"}
