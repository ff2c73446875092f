"""A command with everything that it started: gone when it must be, left alone otherwise."""

from __future__ import annotations

import asyncio

from atoll.conformance import host
from atoll.conformance.bench import Bench, new_mark
from atoll.conformance.check import check
from atoll.conformance.findings import must, must_equal, until
from atoll.conformance.inside import running, until_gone, until_running, zombies
from atoll.model import Capability, Cause
from atoll.sandbox.sandbox import AsyncSandbox


def evil_tree(mark: str) -> str:
    """Return a script that forks twice, calls setsid, ignores SIGTERM and holds standard output open."""
    return f"trap '' TERM HUP INT; ( ( setsid sleep {mark} & ) & ); ( setsid sleep {mark} & ); echo up; sleep {mark}"


# Each generation leaves its parent, its session and its group before it can be observed.
_HOPPER = 'trap "" TERM HUP\nsetsid sh "$0" "$1" &\nexit 0\n'


async def _must_be_gone(sandbox: AsyncSandbox, mark: str, when: str) -> None:
    left = await running(sandbox, mark)
    must(not left, f"{len(left)} processes of the command are left {when}: {left[:3]}")
    must_equal(host.processes(mark), [], f"the processes seen from the host {when}")


@check()
async def a_timeout_takes_the_whole_tree(bench: Bench) -> None:
    """Also what forked twice, called setsid, ignores SIGTERM and holds stdout open is gone when `exec` returns."""
    async with bench.sandbox() as sandbox:
        for _ in range(3):
            mark = new_mark()
            async with asyncio.timeout(20):
                result = await sandbox.exec(evil_tree(mark), timeout=1)
            must_equal((result.cause, result.stdout), (Cause.TIMEOUT, "up\n"), "the result")
            await _must_be_gone(sandbox, mark, "after its timeout")


@check()
async def a_timeout_takes_no_other_tree(bench: Bench) -> None:
    """What another command left running lives on."""
    mark, other = new_mark(), new_mark()
    async with bench.sandbox() as sandbox:
        await sandbox.exec(f"sleep {other} >/dev/null 2>&1 &", timeout=10)
        await sandbox.exec(evil_tree(mark), timeout=0.2)
        await _must_be_gone(sandbox, mark, "after its timeout")
        must_equal(len(await running(sandbox, other)), 1, "the number of processes that another command left")


@check()
async def a_process_that_keeps_forking_is_caught(bench: Bench) -> None:
    """One that forks, changes its session and exits without pause is gone when `exec` returns."""
    mark = new_mark()
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("hop", _HOPPER)
        async with asyncio.timeout(40):
            result = await sandbox.exec(f"sh ./hop {mark}; sleep {mark}", timeout=0.5)
        must_equal(result.cause, Cause.TIMEOUT, "the cause")
        for _ in range(20):
            await _must_be_gone(sandbox, mark, "after its timeout")


@check()
async def a_kill_takes_the_whole_tree(bench: Bench) -> None:
    """Killing a background command takes everything it started, and that is gone on return."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        command = await sandbox.start(evil_tree(mark))
        must_equal((await anext(aiter(command))).text, "up\n", "its first word")
        async with asyncio.timeout(20):
            await command.kill()
            await _must_be_gone(sandbox, mark, "after it was killed")
            result = await command.wait()
        must_equal((result.cause, result.exit_code), (Cause.KILLED, 137), "how the killed command ended")
        must_equal(result.stdout, "up\n", "what it wrote before")
        await command.kill()


@check()
async def a_cancelled_exec_takes_the_whole_tree(bench: Bench) -> None:
    """Cancelling the call kills the command and everything it started."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        task = asyncio.create_task(sandbox.exec(evil_tree(mark), timeout=100))
        await until_running(sandbox, mark)
        task.cancel()
        await asyncio.wait([task])
        must(task.cancelled(), "a cancelled command did not end as cancelled")
        await until_gone(sandbox, mark, "a cancelled command still runs")
        must_equal(host.processes(mark), [], "the processes seen from the host")


@check()
async def a_child_that_holds_the_output_does_not_delay_the_result(bench: Bench) -> None:
    """The result comes when the command itself ends, with all that it wrote."""
    mark = new_mark()
    async with bench.sandbox() as sandbox:
        async with asyncio.timeout(20):
            result = await sandbox.exec(f"sleep {mark} & echo done; head -c 500000 /dev/zero", timeout=60)
        must_equal((result.exit_code, len(result.stdout)), (0, 500_005), "the result")
        must_equal(len(await running(sandbox, mark)), 1, "the number of children that were left")


@check()
async def what_a_normal_end_leaves_lives_on(bench: Bench) -> None:
    """A server that a command starts in the background stays until the sandbox is deleted."""
    mark = new_mark()
    async with bench.sandbox() as sandbox:
        await sandbox.exec(f"( setsid sleep {mark} >/dev/null 2>&1 & )", timeout=10)
        await sandbox.exec(f"nohup sleep {mark} >/dev/null 2>&1 &", timeout=10)

        async def both() -> bool:
            # Before its exec each is a copy of its shell, and for a moment it has no command line.
            command_lines = [line.partition("<==")[2].split() for line in await running(sandbox, mark)]
            return command_lines == [["sleep", mark]] * 2

        await until(both, "what a command leaves running is not there")
        for _ in range(3):
            await sandbox.exec("true", timeout=10)
            must_equal(len(await running(sandbox, mark)), 2, "the number of processes that were left")

    async def ended() -> bool:
        return not host.processes(mark)

    await until(ended, "processes outlive their sandbox")


@check(needs={Capability.ISOLATION})
async def nothing_that_ended_stays_a_zombie(bench: Bench) -> None:
    """Orphans are collected, whoever left them."""
    async with bench.sandbox() as sandbox:
        await sandbox.exec(
            "i=0; while [ $i -lt 30 ]; do ( true & ); ( ( sleep 0.01 & ) & ); i=$((i+1)); done", timeout=20
        )
        await asyncio.gather(*(sandbox.exec("( sleep 0.05 & ) & exit 3", timeout=10) for _ in range(10)))

        async def none() -> bool:
            return not await zombies(sandbox)

        await until(none, "processes that ended are not collected")


@check()
async def a_stopped_command_is_killed_too(bench: Bench) -> None:
    """A command that stopped itself and its children cannot escape its timeout."""
    mark = new_mark()
    async with bench.sandbox() as sandbox:
        async with asyncio.timeout(20):
            result = await sandbox.exec(f"sleep {mark} & kill -STOP $! $$; sleep {mark}", timeout=0.3)
        must_equal(result.cause, Cause.TIMEOUT, "the cause")
        await _must_be_gone(sandbox, mark, "after its timeout")


@check()
async def a_wide_tree_is_killed(bench: Bench) -> None:
    """Three hundred processes of one command are gone when `exec` returns."""
    mark = new_mark()
    async with bench.sandbox() as sandbox:
        command = f"i=0; while [ $i -lt 300 ]; do sleep {mark} & i=$((i+1)); done; echo up; wait"
        async with asyncio.timeout(40):
            result = await sandbox.exec(["sh", "-c", command], timeout=1.5)
        must_equal(result.cause, Cause.TIMEOUT, "the cause")
        await _must_be_gone(sandbox, mark, "after its timeout")
