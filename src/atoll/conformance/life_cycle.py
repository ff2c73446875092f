"""From create to delete: a sandbox exists, or it is gone without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from atoll.conformance import host
from atoll.conformance.bench import Bench, new_mark
from atoll.conformance.check import check
from atoll.conformance.findings import SkippedError, must, must_equal, refusal, until
from atoll.conformance.inside import until_running
from atoll.errors import ImageError, SandboxError, SandboxGoneError, SandboxNotFoundError, SpecError
from atoll.model import Capability, Cause, State
from atoll.sandbox.sandbox import AsyncSandbox

_CANCEL_AFTER_S = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)


@check()
async def a_sandbox_answers_once_it_is_created(bench: Bench) -> None:
    """`create` returns when the first command can run."""
    async with bench.sandbox() as sandbox:
        must_equal((await sandbox.exec("echo hello", timeout=10)).stdout, "hello\n", "what the first command writes")
        must_equal((await sandbox.inspect()).state, State.RUNNING, "the state of a new sandbox")


@check()
async def delete_leaves_nothing_and_may_be_repeated(bench: Bench) -> None:
    """After `delete` there is no process, mount or file of the sandbox, and deleting it again is fine."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("some/file", "content")
        await sandbox.exec("mkfifo fifo; mkdir -p locked/in && chmod 000 locked; (sleep 1000 &)", timeout=10)
        handle = await bench.handle(sandbox.id)
        assert handle is not None
    await sandbox.cleanup()
    await bench.engine.delete(handle)
    await bench.engine.delete(handle)
    must_equal(host.traces(bench.settings, sandbox.id), [], "what is left of a deleted sandbox")
    must(await bench.handle(sandbox.id) is None, "a deleted sandbox is still listed")
    must_equal((await bench.engine.inspect(handle)).state, State.MISSING, "the state of a deleted sandbox")


@check()
async def several_may_delete_at_once(bench: Bench) -> None:
    """Concurrent deletes of one sandbox all succeed."""
    async with bench.sandbox() as sandbox:
        handle = await bench.handle(sandbox.id)
        assert handle is not None
        await asyncio.gather(*(bench.engine.delete(handle) for _ in range(4)))
    must_equal(host.traces(bench.settings, sandbox.id), [], "what is left of a deleted sandbox")


@check()
async def delete_ends_what_runs(bench: Bench) -> None:
    """A running command neither holds up a delete nor outlives it, and whoever waits for it is told."""
    mark = new_mark()
    async with bench.sandbox() as sandbox:
        waiting = asyncio.create_task(sandbox.exec(f"trap '' TERM; setsid sleep {mark} & sleep {mark}", timeout=100))
        await until_running(sandbox, mark)
        other = await AsyncSandbox.attach(sandbox.id, engine=bench.engine, settings=bench.settings)
        async with asyncio.timeout(30):
            await other.cleanup()
            try:
                result = await waiting
                # The command may die a moment before its sandbox does.
                must(result.cause in (Cause.KILLED, Cause.LOST), f"its cause is {result.cause}")
            except SandboxError as error:
                must(isinstance(error, SandboxGoneError), f"it should end with SandboxGoneError, not {error!r}")
    must_equal(host.processes(mark), [], "the processes of a deleted sandbox")


@check()
async def a_sandbox_that_was_cleaned_up_says_so(bench: Bench) -> None:
    """Using it afterwards is a SandboxGoneError with the cause, never a hang."""
    async with bench.sandbox() as sandbox:
        pass
    error = await refusal(sandbox.exec("true", timeout=5), SandboxGoneError, "a command after cleanup")
    must_equal(error.cause, Cause.USER, "the cause")
    attempt = AsyncSandbox.attach(sandbox.id, engine=bench.engine, settings=bench.settings)
    await refusal(attempt, SandboxNotFoundError, "attaching to a deleted sandbox")


@check()
async def every_sandbox_is_listed_with_its_spec(bench: Bench) -> None:
    """`list` finds all that exist, with the spec they were made from."""
    async with bench.sandbox(labels={"name": "one"}) as one, bench.sandbox(env={"TWO": "2"}) as two:
        found = {handle.sandbox_id: handle for handle in await bench.engine.list()}
        for sandbox in (one, two):
            must(sandbox.id in found, "a sandbox that exists is not listed")
            must_equal(found[sandbox.id].spec, sandbox.spec, "the spec that is listed")
            must_equal(found[sandbox.id].engine, bench.engine.name, "the engine that is listed")
            must(0 < found[sandbox.id].created_at <= time.time(), "the time of creation is wrong")


@check()
async def a_name_is_used_only_once(bench: Bench) -> None:
    """A second sandbox of the same id is refused, and the first one goes on."""
    async with bench.sandbox() as sandbox:
        await refusal(bench.engine.create(sandbox.id, sandbox.spec), SandboxError, "creating a sandbox that exists")
        must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "what the first sandbox answers")


@check()
async def names_that_could_become_paths_are_refused(bench: Bench) -> None:
    """An id is part of paths: `..`, slashes and empty names are a SpecError."""
    for name in ("", "..", "a/b", "../x", "a b", "a\0b", "x" * 300):
        await refusal(bench.engine.create(name, bench.unmade().spec), SpecError, f"a sandbox named {name[:20]!r}")


@check()
async def the_agent_killed_is_told_with_its_cause(bench: Bench) -> None:
    """When the sandbox's own processes are killed, commands end with SandboxGoneError and a cause; nothing hangs."""
    async with bench.sandbox() as sandbox:
        waiting = asyncio.create_task(sandbox.exec("sleep 1000", timeout=100))
        await sandbox.exec("true", timeout=10)
        pids = host.processes_with_relatives(sandbox.id)
        if not pids:
            waiting.cancel()
            await asyncio.wait([waiting])
            raise SkippedError("this user cannot see the processes of a sandbox")
        for number in (signal.SIGSTOP, signal.SIGKILL):  # otherwise the agent could still report the end of the command
            for pid in pids:
                _kill(pid, number)
        async with asyncio.timeout(30):
            errors = [
                await refusal(waiting, SandboxGoneError, "the command that was running"),
                await refusal(sandbox.exec("true", timeout=5), SandboxGoneError, "the next command"),
                await refusal(sandbox.read_file("x"), SandboxGoneError, "reading a file"),
            ]
        must(errors[0].cause in set(Cause), f"{errors[0].cause!r} is no cause")
        seen = await sandbox.inspect()
        must(seen.state in (State.STOPPED, State.ERROR), f"a dead sandbox is said to be {seen.state}")
        must(seen.cause is not None and seen.reason, "it is not said why the sandbox is dead")
        must_equal(errors[1].cause, seen.cause, "the cause in the error")
        must(await bench.handle(sandbox.id) is not None, "a dead sandbox is not listed, so nobody would delete it")
    must_equal(host.traces(bench.settings, sandbox.id), [], "what is left of a dead sandbox that was deleted")


@check()
async def a_failed_create_leaves_nothing(bench: Bench) -> None:
    """An image that does not exist is an ImageError with code and hint, and nothing stays behind."""
    sandbox = bench.unmade(image="no-such-image")
    error = await refusal(sandbox.create(), ImageError, "a sandbox of an image that does not exist")
    must("no-such-image" in error.reason, f"the error does not name the image: {error.reason}")
    must(error.hint, "the error does not say what to do")
    must_equal(host.traces(bench.settings, sandbox.id), [], "what a failed create left behind")
    must(await bench.handle(sandbox.id) is None, "a sandbox whose creation failed is listed")


@check()
async def a_cancelled_create_leaves_nothing(bench: Bench) -> None:
    """Whenever it is cancelled, no process, mount or file of the sandbox stays."""
    for delay_s in _CANCEL_AFTER_S:
        sandbox = bench.unmade()
        task = asyncio.create_task(sandbox.create())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await sandbox.cleanup()
        must_equal(host.traces(bench.settings, sandbox.id), [], f"what a create cancelled after {delay_s} s left")
        must(await bench.handle(sandbox.id) is None, "a sandbox whose creation was cancelled is listed")


@check()
async def many_can_be_made_at_once(bench: Bench) -> None:
    """Sandboxes made concurrently do not disturb each other."""

    async def use(number: int) -> None:
        async with bench.sandbox() as sandbox:
            await sandbox.write_file("number", str(number))
            must_equal((await sandbox.exec("cat number", timeout=20)).stdout, str(number), "what a sandbox holds")

    await asyncio.gather(*(use(number) for number in range(8)))


@check()
async def one_object_serves_one_loop_after_another(bench: Bench) -> None:
    """Nothing of a sandbox, its shells and commands is bound to the event loop that it was made in."""
    async with bench.sandbox() as sandbox:
        await sandbox.run_command("value=kept", 10)
        command = await sandbox.start("cat", stdin=True)
        await command.send_stdin("first ")

        async def elsewhere() -> None:
            must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "a command in a second loop")
            must_equal(await sandbox.run_command("echo $value", 10), "kept", "the shell's variable in a second loop")
            await command.send_stdin("second")
            await command.close_stdin()
            must_equal((await command.wait()).stdout, "first second", "a background command in a second loop")

        await asyncio.to_thread(asyncio.run, elsewhere())
        must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "a command back in the first loop")
        must_equal(await sandbox.run_command("echo $value", 10), "kept", "the shell's variable in the first loop")


@check()
async def every_engine_gives_the_same_variables(bench: Bench) -> None:
    """What a program finds by default does not depend on the engine, in a command as in the shell."""
    wanted = {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", "SHELL": "/bin/sh", "TERM": "dumb"}
    async with bench.sandbox() as sandbox:
        for shown in ((await sandbox.exec("env", timeout=10)).stdout, await sandbox.run_command("env", 10)):
            found = dict(line.partition("=")[::2] for line in shown.splitlines())
            must_equal({name: found.get(name) for name in wanted}, wanted, "the variables")
            must_equal(found.get("LOGNAME"), found.get("USER", "none"), "the name of the user")
            must(found.get("HOME") and found.get("PATH"), "there is no HOME or no PATH")


@check()
async def the_environment_is_the_sandboxes_own(bench: Bench) -> None:
    """What the spec says is in the environment of every command; nothing of this process's environment is."""
    secret = f"canary-{new_mark()}"
    os.environ["ATOLL_CANARY"] = secret
    try:
        async with bench.sandbox(env={"GIVEN": "a b\n'c'"}) as sandbox:
            result = await sandbox.exec("env; cat /proc/1/environ /proc/self/environ 2>/dev/null || true", timeout=10)
            if Capability.ISOLATION not in (await bench.engine.describe()).capabilities:
                result = await sandbox.exec("env", timeout=10)
            must(secret not in result.stdout, "a variable of this process is visible in the sandbox")
            shown = await sandbox.exec('printf %s "$GIVEN"', timeout=10)
            must_equal(shown.stdout, "a b\n'c'", "the variable that the spec gives")
            must_equal(await sandbox.run_command('printf %s "$GIVEN"', 10), "a b\n'c'", "the same in the shell")
            must(secret not in await sandbox.run_command("env", 10), "a variable of this process is in the shell")
    finally:
        del os.environ["ATOLL_CANARY"]


@check()
async def resources_in_use_are_known_or_none(bench: Bench) -> None:
    """`stats` gives plausible figures, or None for what the engine cannot know."""
    async with bench.sandbox() as sandbox:
        stats = await sandbox.stats()
        must(stats.memory_bytes is None or stats.memory_bytes > 0, f"it uses {stats.memory_bytes} bytes of memory")
        must(stats.pids is None or stats.pids >= 1, f"it has {stats.pids} processes")
        must(stats.cpu_s is None or stats.cpu_s >= 0, f"it has used {stats.cpu_s} s of processor time")
        must(stats.disk_bytes is None or stats.disk_bytes >= 0, f"it uses {stats.disk_bytes} bytes of disk")


@check()
async def a_detached_sandbox_goes_on(bench: Bench) -> None:
    """`detach` lets go of it; `attach` finds it as it was, with what runs in it."""
    mark = new_mark()
    sandbox = await bench.unmade().create()
    try:
        await sandbox.start(f"sleep {mark}")
        await sandbox.write_file("kept", "yes")
    finally:
        await sandbox.detach()
    again = await AsyncSandbox.attach(sandbox.id, engine=bench.engine, settings=bench.settings)
    try:
        must_equal(await again.read_file("kept"), "yes", "a file of a sandbox that was attached to")
        await until_running(again, mark)
    finally:
        await again.cleanup()

    async def ended() -> bool:
        return not host.processes(mark)

    await until(ended, "a command outlives its deleted sandbox")


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
