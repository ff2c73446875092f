"""Background commands: given input, followed, left and found again."""

from __future__ import annotations

import asyncio

from atoll.conformance.bench import Bench, new_mark
from atoll.conformance.check import check
from atoll.conformance.findings import must, must_equal, refusal, until
from atoll.conformance.inside import WAIT_FOR_GO, running, until_running
from atoll.model import Cause
from atoll.sandbox.command import AsyncCommand, Output
from atoll.sandbox.sandbox import AsyncSandbox


async def _attach(bench: Bench, sandbox: AsyncSandbox) -> AsyncSandbox:
    return await AsyncSandbox.attach(sandbox.id, engine=bench.engine, settings=bench.settings)


@check()
async def it_can_be_waited_for(bench: Bench) -> None:
    """`start` returns at once; `wait` gives what `exec` would have given."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start(f"echo out; echo err >&2; {WAIT_FOR_GO}; exit 5")
        must(command.pid > 0, "a running command has no number")
        must(command.id in await sandbox.commands(), "a running command is not among the commands")
        await sandbox.write_file("go", "")
        result = await command.wait()
        must_equal((result.stdout, result.stderr), ("out\n", "err\n"), "its output")
        must_equal((result.exit_code, result.cause), (5, Cause.EXIT), "its end")
        must_equal((await command.wait()).exit_code, 5, "the exit code when asked again")


@check()
async def its_output_can_be_followed(bench: Bench) -> None:
    """Iterating gives each piece as it comes, with the stream it came from."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start(f"echo one; {WAIT_FOR_GO}; echo two >&2")
        pieces: list[Output] = []
        async with asyncio.timeout(20):
            async for piece in command:
                pieces.append(piece)
                if piece.data == b"one\n":
                    await sandbox.write_file("go", "")
        must_equal(pieces, [Output("stdout", b"one\n"), Output("stderr", b"two\n")], "the pieces")
        must_equal((await command.wait()).exit_code, 0, "the exit code after following it")


@check()
async def it_can_be_fed(bench: Bench) -> None:
    """What is sent reaches its input in order; closing it is the end of file."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start("while read -r line; do echo got $line; done; echo over", stdin=True)
        output = aiter(command)
        for text in ("a", "b"):
            await command.send_stdin(f"{text}\n")
            async with asyncio.timeout(10):
                must_equal((await anext(output)).text, f"got {text}\n", "the answer to what was sent")
        await command.close_stdin()
        must_equal((await anext(output)).text, "over\n", "the answer to the end of the input")
        must_equal((await command.wait()).exit_code, 0, "the exit code")


@check()
async def much_input_waits_for_a_slow_reader(bench: Bench) -> None:
    """Three megabytes for a command that reads late all arrive."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start(f"{WAIT_FOR_GO}; wc -c", stdin=True)
        sending = asyncio.create_task(command.send_stdin(b"x" * 3_000_000))
        await sandbox.write_file("go", "")
        async with asyncio.timeout(30):
            await sending
            await command.close_stdin()
            must_equal((await command.wait()).stdout.strip(), "3000000", "the number of bytes that arrived")


@check()
async def signals_reach_it(bench: Bench) -> None:
    """Any signal can be sent; the command may handle it."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start("trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.02; done")
        output = aiter(command)
        must_equal((await anext(output)).text, "up\n", "its first word")
        await command.kill(15)
        async with asyncio.timeout(10):
            result = await command.wait()
        must_equal((result.exit_code, result.cause), (4, Cause.EXIT), "the end of a command that handles SIGTERM")
        must(result.stdout.endswith("bye\n"), f"what it wrote: {result.stdout!r}")


@check()
async def it_has_a_timeout_if_asked_for(bench: Bench) -> None:
    """The timeout is kept inside the sandbox, also when nobody follows."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        command = await sandbox.start(f"echo up; sleep {mark}", timeout=0.4)
        await command.detach()

        async def gone() -> bool:
            return not await running(sandbox, mark)

        await until(gone, "a background command runs beyond its timeout")
        result = await (await sandbox.command(command.id)).wait()
        must_equal((result.cause, result.exit_code, result.stdout), (Cause.TIMEOUT, 124, "up\n"), "its result")


@check()
async def it_is_found_again_by_its_id(bench: Bench) -> None:
    """From offset 0 all of its output comes again, from a later offset the rest, on this or another object."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start(f"echo one; echo err >&2; {WAIT_FOR_GO}; echo two")
        await _read(command, 8)
        offsets = command.offsets
        must_equal(offsets, (4, 4), "how far was read")
        await command.detach()
        other = await _attach(bench, sandbox)
        try:
            rest = await other.command(command.id, offsets=offsets)
            await sandbox.write_file("go", "")
            result = await rest.wait()
            must_equal((result.stdout, result.stderr), ("two\n", ""), "the rest of the output")
        finally:
            await other.detach()


@check()
async def its_output_is_kept_from_the_start(bench: Bench) -> None:
    """Who attaches from offset 0 after it has ended gets everything, and how it ended."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start("echo one; echo two; touch ended; exit 6")
        await command.detach()
        await until(lambda: sandbox.exists("ended"), "a background command does not run")
        again = await sandbox.command(command.id)
        result = await again.wait()
        must_equal((result.stdout, result.exit_code), ("one\ntwo\n", 6), "its output and exit code")
        must_equal((again.dropped_bytes, result.truncated), (0, False), "what is missing")


@check()
async def what_was_dropped_is_told(bench: Bench) -> None:
    """If more was written than is kept while nobody listened, it is said how much is missing."""
    async with bench.sandbox() as sandbox:
        size = 4_000_000
        command = await sandbox.start(f"{WAIT_FOR_GO}; head -c {size} /dev/zero; touch ended")
        await command.detach()
        await sandbox.write_file("go", "")
        await until(lambda: sandbox.exists("ended"), "a command whose output nobody reads is stuck")
        again = await sandbox.command(command.id)
        pieces = [piece.data async for piece in again]
        must(again.dropped_bytes > 0, "nothing is said to be missing")
        must_equal(sum(map(len, pieces)) + again.dropped_bytes, size, "what came and what is missing together")
        must_equal(again.offsets[0], size, "the offset at the end")
        result = await again.wait()
        must(result.truncated, "the result does not say that output is missing")
        must(f"{again.dropped_bytes} bytes left out" in result.stdout, "the text does not say how much is missing")


@check()
async def an_unknown_id_is_told(bench: Bench) -> None:
    """FileNotFoundError for a command that never was."""
    async with bench.sandbox() as sandbox:
        await refusal(sandbox.command("0123456789abcdef"), FileNotFoundError, "an unknown command")


@check()
async def killing_and_feeding_after_the_end_is_harmless(bench: Bench) -> None:
    """A kill of what has ended does nothing; input for it is a BrokenPipeError."""
    async with bench.sandbox() as sandbox:
        command = await sandbox.start("true", stdin=True)
        await command.wait()
        await command.kill()
        await command.kill(15)
        await refusal(command.send_stdin("x"), BrokenPipeError, "input for a command that has ended")


@check()
async def a_program_that_cannot_start_is_a_result(bench: Bench) -> None:
    """Missing programs end with 127, as with `exec`."""
    async with bench.sandbox() as sandbox:
        result = await (await sandbox.start(["no-such-program"])).wait()
        must_equal(result.exit_code, 127, "the exit code")
        must("no-such-program" in result.stderr, f"its message: {result.stderr!r}")


@check()
async def a_command_without_a_reader_goes_on(bench: Bench) -> None:
    """A command that writes much is not stopped because nobody takes its output."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        command = await sandbox.start(f"head -c 20000000 /dev/zero; touch ended; sleep {mark}")
        await command.detach()
        await until(lambda: sandbox.exists("ended"), "a command whose output nobody reads is stuck")
        await until_running(sandbox, mark)


async def _read(command: AsyncCommand, count: int) -> None:
    """Read this many bytes of a command's output."""
    async with asyncio.timeout(20):
        async for _ in command:
            if sum(command.offsets) >= count:
                return
