from __future__ import annotations

import asyncio
import inspect
import socket

from atoll.manager.managed_sandbox import ManagedAccess, ManagedSandbox
from atoll.manager.usage import MeteredSocket, Usage
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.sandbox.sandbox_access import SandboxAccess
from manager.times import ManualClock


def test_an_operation_counts_from_its_start_to_its_end(clock: ManualClock) -> None:
    usage = Usage(clock.now)
    clock.advance(10)
    assert usage.idle_s() == 10
    with usage.operation(), usage.operation():
        clock.advance(100)
        assert usage.idle_s() == 0
        assert usage.active == 2
    clock.advance(3)
    assert usage.idle_s() == 3


async def test_quiet_returns_when_the_last_operation_ends(clock: ManualClock) -> None:
    usage = Usage(clock.now)
    with usage.operation():
        waiting = asyncio.ensure_future(usage.quiet())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    await usage.quiet()


def test_every_byte_in_and_out_is_a_use(clock: ManualClock) -> None:
    usage = Usage(clock.now)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with MeteredSocket.of(ours, usage) as metered, theirs:
        assert metered.getblocking() is False
        clock.advance(5)
        metered.send(b"question")
        assert usage.idle_s() == 0
        clock.advance(5)
        theirs.send(b"answer")
        assert metered.recv_into(bytearray(10)) == 6
        assert usage.idle_s() == 0


def test_everything_that_can_be_done_with_a_sandbox_is_counted() -> None:
    """A new operation of AsyncSandbox must be counted too, or the reaper could end a sandbox in the middle of it."""
    not_a_use = {
        "create",
        "attach",
        "cleanup",
        "detach",
        "info",
        "inspect",
        "stats",
        "run_command",
        "delete",  # by `copy_from` and `cleanup`
    }
    for name, value in inspect.getmembers(AsyncSandbox):
        if name.startswith("_") or name in not_a_use or inspect.ismethod(value):
            continue  # methods of the class itself use no sandbox
        if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
            assert name in vars(ManagedSandbox), f"{name} is not counted"


def test_everything_that_a_sandbox_gives_out_counts_its_own_use() -> None:
    given = [name for name in vars(SandboxAccess) if name.startswith("new_")]
    assert {"new_command", "new_shell", "new_terminal"} <= {*given}
    assert {*given} <= vars(ManagedAccess).keys()
