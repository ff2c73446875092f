"""The death of the calling process: sandboxes, commands and output are there for the next process."""

from __future__ import annotations

import asyncio

from atoll.conformance import host
from atoll.conformance.bench import Bench
from atoll.conformance.check import check
from atoll.conformance.findings import must, must_equal, until
from atoll.model import State
from atoll.sandbox.sandbox import AsyncSandbox

_LINES = 300
_WRITER = "i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); sleep 0.003; done; echo err >&2; exit 3"
_CREATOR = """
async def main(bench, command):
    sandbox = await bench.unmade(env={"KEPT": "yes"}).create()
    await sandbox.write_file("kept", "content")
    await sandbox.run_command("cd /; sleep 10000 &", 10)
    started = await sandbox.start(command)
    print(sandbox.id, started.id, flush=True)
    async for piece in started:
        pass
    await asyncio.sleep(1000)
"""
_READER = """
async def main(bench, sandbox_id, command_id):
    from atoll.sandbox.sandbox import AsyncSandbox
    sandbox = await AsyncSandbox.attach(sandbox_id, engine=bench.engine, settings=bench.settings)
    command = await sandbox.command(command_id)
    result = await command.wait()
    print(json.dumps([result.stdout, result.stderr, result.exit_code, command.dropped_bytes]))
    await sandbox.detach()
"""
_INTERRUPTED = """
async def main(bench):
    sandbox = bench.unmade()
    print(sandbox.id, flush=True)
    await sandbox.create()
    await asyncio.sleep(1000)
"""


async def _ids(process: asyncio.subprocess.Process) -> tuple[str, str]:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        words = (await process.stdout.readline()).decode().split()
    if len(words) != 2:
        assert process.stderr is not None
        raise AssertionError(f"another process failed: {(await process.stderr.read()).decode(errors='replace')}")
    return words[0], words[1]


@check()
async def nothing_is_lost_when_our_process_is_killed(bench: Bench) -> None:
    """After kill -9 while a command writes, a new process attaches and reads all of its output from offset 0."""
    async with bench.other_process(_CREATOR, _WRITER.format(lines=_LINES)) as process:
        sandbox_id, command_id = await _ids(process)
        process.kill()
        await process.wait()
    sandbox = await AsyncSandbox.attach(sandbox_id, engine=bench.engine, settings=bench.settings)
    try:
        must_equal((await sandbox.inspect()).state, State.RUNNING, "the state of a sandbox whose maker died")
        must_equal(sandbox.spec.env, {"KEPT": "yes"}, "the spec that is known")
        command = await sandbox.command(command_id)
        async with asyncio.timeout(30):
            result = await command.wait()
        expected = "".join(f"line {number}\n" for number in range(_LINES))
        must_equal(result.stdout, expected, "the output from offset 0")
        must_equal((result.stderr, result.exit_code, command.dropped_bytes), ("err\n", 3, 0), "the rest of the result")
        must_equal(await sandbox.read_file("kept"), "content", "a file written before")
        must_equal((await sandbox.exec("echo $KEPT", timeout=10)).stdout, "yes\n", "a new command")
    finally:
        await sandbox.cleanup()
    must_equal(host.traces(bench.settings, sandbox_id), [], "what is left after cleaning up")
    must(await bench.handle(sandbox_id) is None, "the sandbox is still listed")


@check()
async def another_process_can_take_over(bench: Bench) -> None:
    """While the first one lives, another attaches, reads everything and leaves; the sandbox goes on."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start("echo one; echo two >&2; exit 4")
        await command.detach()
        answer = await bench.answer_of_other_process(_READER, sandbox.id, command.id)
        must_equal(answer.strip(), '["one\\n", "two\\n", 4, 0]', "what another process read")
        must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "the sandbox afterwards")


@check()
async def a_creation_that_was_killed_is_cleaned_up(bench: Bench) -> None:
    """Whenever our process dies while making a sandbox, the next one finds what there is and can delete it."""
    for delay_s in (0.0, 0.01, 0.03):
        async with bench.other_process(_INTERRUPTED) as process:
            assert process.stdout is not None
            async with asyncio.timeout(30):
                sandbox_id = (await process.stdout.readline()).decode().strip()
            await asyncio.sleep(delay_s)
            process.kill()
            await process.wait()
        await _delete_if_listed(bench, sandbox_id)

        async def nothing(sandbox_id: str = sandbox_id) -> bool:
            await _delete_if_listed(bench, sandbox_id)
            return not host.traces(bench.settings, sandbox_id)

        await until(nothing, f"a creation that was killed after {delay_s} s leaves something behind")


async def _delete_if_listed(bench: Bench, sandbox_id: str) -> None:
    handle = await bench.handle(sandbox_id)
    if handle is not None:
        await bench.engine.inspect(handle)
        await bench.engine.delete(handle)
