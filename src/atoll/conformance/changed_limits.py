"""Limits that are changed while a sandbox runs: an engine does it really or refuses it by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from atoll.conformance.bench import Bench
from atoll.conformance.check import check, must, must_equal, refusal
from atoll.errors import SandboxResourceError, SpecError, UnsupportedError
from atoll.model import Capability

_MIB = 1 << 20
_CHANGES: dict[Capability, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    Capability.MEMORY: (
        "memory_bytes",
        {"memory": 400 * _MIB},
        {"memory": 64 * _MIB},
        "dd if=/dev/zero of=/dev/null bs=200M count=1",
    ),
    Capability.PIDS: (
        "pids",
        {"pids": 128},
        {"pids": 32},
        "i=0; while [ $i -lt 60 ]; do sleep 1 & i=$((i+1)); done; wait",
    ),
    Capability.DISK: (
        "disk_bytes",
        {"disk": 128 * _MIB},
        {"disk": 32 * _MIB},
        "head -c 64m /dev/zero >big && sync big && rm big && sync",
    ),
}
"""The limit, more and less of it, and a command that works with more only."""


def _changes(capability: Capability) -> Callable[[Bench], Awaitable[None]]:
    async def changes(bench: Bench) -> None:
        name, more, less, command = _CHANGES[capability]
        async with bench.sandbox(**less) as sandbox:
            before = await sandbox.info()
            if name not in (await bench.engine.describe()).changeable_limits:
                error = await refusal(sandbox.set_limits(**more), UnsupportedError, f"a change of {name}")
                must(name in error.reason, f"the error does not name the limit: {error.reason}")
                must(error.hint, "the error does not say what to do")
                must_equal(await sandbox.info(), before, "what the sandbox has after a refused change")
                return
            changed = await sandbox.set_limits(**more)
            must_equal(getattr(changed.limits, name), next(iter(more.values())), "the new limit")
            must_equal(await sandbox.info(), changed, "what the sandbox reports")
            handle = await bench.handle(sandbox.id)
            must(handle is not None and handle.limits().limits == changed.limits, "the engine lists other limits")
            result = await sandbox.exec(["sh", "-c", command], timeout=40)
            must(result.success, f"more is not allowed: {result.cause} {result.stderr[-200:]}")
            if capability is Capability.MEMORY:
                # A kernel of the sandbox's own gives memory back late, and one that takes too much may end as a whole.
                must_equal((await sandbox.set_limits(memory="350m")).limits.memory_bytes, 350 * _MIB, "less memory")
                return
            must_equal(await sandbox.set_limits(**less), before, "what the sandbox has with less")
            must(not (await sandbox.exec(["sh", "-c", command], timeout=20)).success, "less is not enforced")

    changes.__name__ = f"{capability}_is_changed_or_refused"
    changes.__doc__ = f"A new limit of {capability} is in force at once, or refused by its name."
    return changes


for _capability in _CHANGES:
    check(needs={_capability})(_changes(_capability))


@check(needs={Capability.CPUS})
async def processor_time_is_changed_or_refused(bench: Bench) -> None:
    """Less is in force at once, or refused by its name."""
    async with bench.sandbox(limits={"cpus": 1}) as sandbox:
        if "cpus" not in (await bench.engine.describe()).changeable_limits:
            await refusal(sandbox.set_limits(cpus=0.3), UnsupportedError, "a change of cpus")
            return
        must_equal((await sandbox.set_limits(cpus=0.3)).limits.cpus, 0.3, "what the sandbox has now")
        before = (await sandbox.stats()).cpu_s
        result = await sandbox.exec("while :; do :; done", timeout=2)
        after = (await sandbox.stats()).cpu_s
        spent = result.cpu_s if before is None or after is None else after - before
        must(spent < 0.6 * result.duration_s, f"0.3 CPUs were allowed, {spent / result.duration_s:.2f} were used")


@check()
async def a_change_that_is_refused_changes_nothing(bench: Bench) -> None:
    """Invalid limits, less than is in use, and what the engine cannot change: all change or none."""
    async with bench.sandbox() as sandbox:
        before, can = await sandbox.info(), (await bench.engine.describe()).changeable_limits
        await refusal(sandbox.set_limits(), SpecError, "a change of nothing")
        for value in (float("nan"), -1.0, 0.0, 1e9):
            await refusal(sandbox.set_limits(cpus=value), SpecError, f"a change to {value} CPUs")
        if can >= {"pids", "cpus"}:
            await sandbox.start(["sh", "-c", "sleep 600 & sleep 600 & wait"])
            while ((await sandbox.stats()).pids or 9) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            change = sandbox.set_limits(cpus=0.5, pids=2)
            await refusal(change, SandboxResourceError, "fewer processes than there are")
        if not can:
            error = await refusal(sandbox.set_limits(memory="512m", pids=99), UnsupportedError, "a change of limits")
            must("memory_bytes" in error.reason and "pids" in error.reason, f"not all are named: {error.reason}")
        must_equal(await sandbox.info(), before, "what the sandbox has")
        must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "the sandbox afterwards")
