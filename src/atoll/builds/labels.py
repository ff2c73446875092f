"""The labels of a build's sandboxes, and removing those whose builder died."""

from __future__ import annotations

import re

from atoll.engines.contract import Building, Engine
from atoll.engines.host.process_ref import ProcessRef, boot_id, this_process
from atoll.errors import SandboxError
from atoll.model import Handle

BUILD = "atoll.build"
BUILDER = "atoll.builder"
OWNER = "atoll.owner"
_BUILDER = re.compile(r"(\d{1,10})-(\d{1,20})-([0-9a-f-]{1,64})")


def build_labels(build_id: str, owner: str) -> dict[str, str]:
    me = this_process()
    found = {BUILD: build_id, BUILDER: f"{me.pid}-{me.started}-{boot_id()}"}
    return found | ({OWNER: owner} if owner else {})


def is_abandoned(builder: str) -> bool:
    """Return whether the process that this label names has ended."""
    match = _BUILDER.fullmatch(builder)
    if match is None:
        return False
    return match[3] != boot_id() or not ProcessRef(int(match[1]), int(match[2])).is_alive()


def is_left_by_a_build(handle: Handle) -> bool:
    """Return whether a sandbox belongs to a build whose process has ended."""
    builder = handle.spec.labels.get(BUILDER)
    return builder is not None and is_abandoned(builder)


async def sweep(engine: Engine) -> list[str]:
    """Delete the sandboxes of builds whose process died, and return their ids. May be repeated."""
    removed: list[str] = []
    if not isinstance(engine, Building):  # its sandboxes may be on another machine, and so may be their builders
        return removed
    for handle in await engine.list():
        if is_left_by_a_build(handle):
            try:
                await engine.delete(handle)
            except SandboxError:
                continue  # another process is deleting it, or the next sweep does
            removed.append(handle.sandbox_id)
    return removed
