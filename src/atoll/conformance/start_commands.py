"""Start commands: running from the creation on, restarted when they end, waited for until the sandbox is ready."""

from __future__ import annotations

from atoll.conformance.bench import Bench
from atoll.conformance.check import check, must, must_equal, refusal, until
from atoll.errors import StartError
from atoll.model import Capability
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.sandbox.start_up import StartState

_UP = {"name": "up", "command": "echo run >> runs; touch up; exec sleep 1000"}
_READY = {"command": "test -e up", "timeout_s": 30}


async def _state(sandbox: AsyncSandbox) -> StartState:
    (found,) = await sandbox.start_commands()
    return found


async def _runs(sandbox: AsyncSandbox) -> int:
    return (await sandbox.read_file("runs")).count("run\n")


async def _ran(sandbox: AsyncSandbox, times: int) -> bool:
    return await _runs(sandbox) == times


@check()
async def create_returns_when_it_is_ready(bench: Bench) -> None:
    """What the ready check waits for is there, and the start command runs as one of the commands."""
    async with bench.sandbox(start=[_UP], ready=_READY) as sandbox:
        must(await sandbox.exists("up"), "the sandbox was handed out before it was ready")
        must_equal((await _state(sandbox)).state, "running", "the state of the start command")
        must("up" in await sandbox.commands(), "the start command is not among the commands")


@check()
async def what_ends_is_started_again(bench: Bench) -> None:
    """A start command that ends is restarted inside, whether or not anybody watches; a kill ends it for good."""
    async with bench.sandbox(start=[_UP], ready=_READY) as sandbox:
        await (await sandbox.command("up")).kill(15)

        async def again() -> bool:
            seen = await _state(sandbox)
            return (seen.restarts, seen.state) == (1, "running") and await _runs(sandbox) == 2

        await until(again, "the start command that ended was not started again")
        await (await sandbox.command("up")).kill()
        must_equal((await _state(sandbox)).state, "ended", "the state of a start command that was killed")
        must_equal(await _runs(sandbox), 2, "how often it ran after it was killed")


@check()
async def one_that_is_never_ready_leaves_nothing(bench: Bench) -> None:
    """The creation fails at the deadline with the output of the start commands, and nothing is left of it."""
    sandbox = bench.unmade(
        start=["echo cannot open the database >&2; exit 3"], ready={"command": "false", "timeout_s": 0.5}
    )
    error = await refusal(sandbox.create(), StartError, "the creation")
    must("cannot open the database" in error.output, f"the output is missing: {error.output!r}")
    must("not ready within 0.5 s" in error.reason, f"the reason is missing: {error.reason!r}")
    must(await bench.handle(sandbox.id) is None, "something is left of the sandbox")


@check()
async def one_that_cannot_start_is_reported_at_once(bench: Bench) -> None:
    """A program that does not exist fails the creation, and so does a failure of what is never restarted."""
    for command, said in (
        ({"name": "no", "command": ["no-such-program"]}, "could not be started"),
        ({"name": "no", "command": "echo broken; exit 4", "restart": "never"}, "ended with exit code 4: broken"),
    ):
        sandbox = bench.unmade(start=[command], ready={"command": "false", "timeout_s": 60})
        error = await refusal(sandbox.create(), StartError, "the creation")
        must(said in error.reason, f"the reason is missing: {error.reason!r}")
        must(await bench.handle(sandbox.id) is None, "something is left of the sandbox")


@check(needs=[Capability.CHECKPOINTS])
async def they_run_again_after_all_processes_have_ended(bench: Bench) -> None:
    """A rollback, a restart and a fork start them from the beginning, and return when the sandbox is ready."""
    async with bench.sandbox(start=[_UP], ready=_READY) as sandbox:
        saved = await sandbox.checkpoint()
        await sandbox.rollback(saved)
        must_equal((await _state(sandbox)).state, "running", "the state after a rollback")
        await until(lambda: _ran(sandbox, 2), "it did not run again after a rollback")
        (fork,) = await sandbox.fork()
        async with fork:
            must_equal((await _state(fork)).state, "running", "the state in a fork")
            await until(lambda: _ran(fork, 3), "it did not run again in a fork")
        await sandbox.restart()
        must_equal((await _state(sandbox)).state, "running", "the state after a restart")
        await until(lambda: _ran(sandbox, 1), "it did not run after a restart")
