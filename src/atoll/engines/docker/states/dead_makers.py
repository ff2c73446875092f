"""Containers whose maker died.

A Docker engine goes on with a request although whoever asked is gone, and may do so much later: a container appears
that nobody waits for. Each says who made it, so that the next process of the installation finds such a container and
removes it. One that was ever started is a sandbox, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.engines.host.process_ref import ProcessRef, boot_id, this_process

MAKER = "atoll.maker"


def maker_label() -> dict[str, str]:
    """To be put on every container that this process makes."""
    me = this_process()
    return {MAKER: f"{me.pid} {me.started} {boot_id()}"}


def is_abandoned(entry: Mapping[str, Any]) -> bool:
    """Whether the container, as the engine lists it, was never started and nobody can do so any more."""
    words = str((entry.get("Labels") or {}).get(MAKER, "")).split()
    if entry.get("State") != "created" or len(words) != 3 or not (words[0] + words[1]).isdecimal():
        return False
    return words[2] != boot_id() or not ProcessRef(int(words[0]), int(words[1])).is_alive()
