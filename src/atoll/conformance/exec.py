"""`exec`: one command, run to its end."""

from __future__ import annotations

import asyncio

from atoll.conformance.bench import Bench
from atoll.conformance.check import SkippedError, check, must, must_equal, refusal, until
from atoll.conformance.inside import WAIT_FOR_GO
from atoll.model import Capability, Cause
from atoll.sandbox.sandbox import AsyncSandbox

_ALL_BYTES = bytes(range(256))


@check()
async def a_text_is_for_the_shell_and_a_list_is_not(bench: Bench) -> None:
    """A string is a shell command line; the words of a list reach the program as they are."""
    async with bench.sandbox() as sandbox:
        must_equal((await sandbox.exec("A=1; echo $A | cat", timeout=10)).stdout, "1\n", "what the shell writes")
        words = ["printf", "%s|", "a b", "$HOME", "*", "", "'\"\\", "-n", "ü\n"]
        result = await sandbox.exec(words, timeout=10)
        must_equal(result.stdout, "a b|$HOME|*||'\"\\|-n|ü\n|", "what the program was given")


@check()
async def output_and_errors_are_kept_apart(bench: Bench) -> None:
    """Standard output and standard error arrive separately and complete."""
    async with bench.sandbox() as sandbox:
        result = await sandbox.exec("echo out; echo err >&2; printf more; printf worse >&2", timeout=10)
        must_equal(result.stdout, "out\nmore", "standard output")
        must_equal(result.stderr, "err\nworse", "standard error")
        must(result.success and result.duration_s > 0, "a command that ends well is not a success with a duration")


@check()
async def exit_codes_are_reported(bench: Bench) -> None:
    """Every exit code comes back as it is, with the cause `exit`."""
    async with bench.sandbox() as sandbox:
        for code in (0, 1, 2, 77, 124, 137, 255):
            result = await sandbox.exec(f"exit {code}", timeout=10)
            must_equal((result.exit_code, result.cause), (code, Cause.EXIT), f"the end of 'exit {code}'")
            must_equal(result.success, code == 0, f"the success of 'exit {code}'")


@check()
async def signals_are_reported_as_a_shell_does(bench: Bench) -> None:
    """A command that dies of signal n has the exit code 128 + n and the cause `signal`."""
    async with bench.sandbox() as sandbox:
        for number in (1, 6, 9, 11, 15):
            result = await sandbox.exec(f"echo before; ulimit -c 0; kill -{number} $$; sleep 5", timeout=10)
            must_equal((result.exit_code, result.cause), (128 + number, Cause.SIGNAL), f"the end by signal {number}")
            must_equal(result.stdout, "before\n", "what it wrote before")


@check()
async def environment_and_directory_can_be_given(bench: Bench) -> None:
    """`env` adds to the environment of one command, `cwd` is where it runs, below the work directory if relative."""
    async with bench.sandbox(env={"A": "spec", "B": "spec"}) as sandbox:
        result = await sandbox.exec('printf "%s,%s,%s" "$A" "$B" "$C"', env={"B": "own", "C": "x=y z"}, timeout=10)
        must_equal(result.stdout, "spec,own,x=y z", "the variables of the command")
        must_equal((await sandbox.exec('printf %s "$C"', timeout=10)).stdout, "", "a variable of an earlier command")
        await sandbox.make_dir("sub/dir")
        top = (await sandbox.exec("pwd", timeout=10)).stdout.strip()
        must_equal((await sandbox.exec("pwd", cwd="sub/dir", timeout=10)).stdout, f"{top}/sub/dir\n", "the directory")
        must_equal((await sandbox.exec("pwd", cwd="/", timeout=10)).stdout, "/\n", "an absolute directory")
        error = await refusal(sandbox.exec("true", cwd="nowhere", timeout=10), FileNotFoundError, "a missing directory")
        must("nowhere" in str(error), f"the error does not say which directory is missing: {error}")


@check()
async def input_ends(bench: Bench) -> None:
    """`stdin` is given to the command and then ends; without it there is none to wait for."""
    async with bench.sandbox() as sandbox:
        must_equal((await sandbox.exec("cat", stdin="text ü", timeout=10)).stdout, "text ü", "what was read")
        must_equal((await sandbox.exec("cat; echo end", stdin=b"", timeout=10)).stdout, "end\n", "an empty input")
        must_equal((await sandbox.exec("cat; echo end", timeout=10)).stdout, "end\n", "no input")
        large = b"0123456789abcdef" * 200_000
        result = await sandbox.exec("cat", stdin=large, timeout=30)
        must(result.stdout_bytes == large, f"of {len(large)} bytes of input {len(result.stdout_bytes)} came back")
        unread = await sandbox.exec("head -c 1 >/dev/null", stdin=large, timeout=30)
        must_equal(unread.exit_code, 0, "the exit code of a command that does not read its input")


@check()
async def bytes_pass_through_unharmed(bench: Bench) -> None:
    """Output that is not UTF-8 comes back byte by byte, and as text with replacement characters."""
    async with bench.sandbox() as sandbox:
        result = await sandbox.exec("cat; printf '\\377' >&2", stdin=_ALL_BYTES, timeout=10)
        must_equal(result.stdout_bytes, _ALL_BYTES, "the bytes of standard output")
        must_equal(result.stderr_bytes, b"\xff", "the bytes of standard error")
        must_equal(result.stderr, "\N{REPLACEMENT CHARACTER}", "the text of standard error")


@check()
async def a_missing_program_is_127(bench: Bench) -> None:
    """Exit code 127 and a message that names the program, for a list as for a shell command line."""
    async with bench.sandbox() as sandbox:
        for command in (["no-such-program", "x"], "no-such-program x", ["/no/such/program"], ["./no-such-program"]):
            result = await sandbox.exec(command, timeout=10)
            must_equal((result.exit_code, result.cause), (127, Cause.EXIT), f"the end of {command!r}")
            must("such" in result.stderr and "not found" in result.stderr, f"its message: {result.stderr!r}")


@check()
async def a_program_that_cannot_be_executed_is_126(bench: Bench) -> None:
    """Exit code 126 and a message, for a file that is not executable and for a directory."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("plain", "text", mode=0o644)
        await sandbox.make_dir("folder")
        for command in (["./plain"], "./plain", ["./folder"]):
            result = await sandbox.exec(command, timeout=10)
            must_equal(result.exit_code, 126, f"the exit code of {command!r}")
            must(result.stderr, f"{command!r} ends without a message")


@check()
async def a_timeout_is_a_result_with_the_output_so_far(bench: Bench) -> None:
    """Cause `timeout`, exit code 124, and everything that was written before is kept."""
    async with bench.sandbox() as sandbox:
        async with asyncio.timeout(20):
            result = await sandbox.exec("echo out; echo err >&2; sleep 1000; echo never", timeout=0.5)
        must_equal((result.cause, result.exit_code, result.success), (Cause.TIMEOUT, 124, False), "the result")
        must_equal((result.stdout, result.stderr), ("out\n", "err\n"), "the output so far")
        must(result.duration_s >= 0.4, f"it was stopped after {result.duration_s} s, before its time")


@check()
async def bad_commands_are_refused_before_they_are_sent(bench: Bench) -> None:
    """Empty commands, zero bytes and impossible timeouts are a ValueError."""
    async with bench.sandbox() as sandbox:
        bad: list[str | list[str]] = ["", "   ", [], [""], "echo \0", ["echo", "\0"]]
        for command in bad:
            await refusal(sandbox.exec(command, timeout=5), ValueError, f"the command {command!r}")
        for timeout in (0, -1, float("nan")):
            await refusal(sandbox.exec("true", timeout=timeout), ValueError, f"a timeout of {timeout}")
        for name in ("", "A=B", "A\0"):
            await refusal(sandbox.exec("true", env={name: "x"}), ValueError, f"a variable named {name!r}")
        must_equal((await sandbox.exec("echo ok", timeout=5)).stdout, "ok\n", "the sandbox after bad commands")


@check()
async def long_arguments_work_or_are_refused(bench: Bench) -> None:
    """An argument of 100,000 characters arrives; one that no system could take is an error, never a hang."""
    async with bench.sandbox() as sandbox:
        result = await sandbox.exec(["sh", "-c", 'echo "${#1}"', "sh", "x" * 100_000], timeout=10)
        must_equal(result.stdout, "100000\n", "the length of a long argument")
        many = await sandbox.exec(["sh", "-c", 'echo "$#"', "sh", *["word"] * 5000], timeout=10)
        must_equal(many.stdout, "5000\n", "the number of many arguments")
        error = await refusal(sandbox.exec(["echo", "x" * 1_000_000], timeout=10), Exception, "a huge argument")
        must(
            isinstance(error, OSError | ValueError), f"a huge argument should be a ValueError or OSError, not {error!r}"
        )


@check()
async def truncation_is_visible(bench: Bench) -> None:
    """Output beyond the limit is left out in the middle, and both the flag and the text say so."""
    async with bench.sandbox() as sandbox:
        command = "echo begin; head -c 300000 /dev/zero | tr '\\0' x; echo; echo end"
        result = await sandbox.exec(command, max_output_bytes=10_000, timeout=20)
        must(result.truncated, "the result does not say that output was left out")
        must(result.stdout.startswith("begin\nx"), "the beginning of the output is missing")
        must(result.stdout.endswith("x\nend\n"), "the end of the output is missing")
        missing = 300_000 + len("begin\n\nend\n") - 10_000
        must(f"{missing} bytes left out" in result.stdout, "the text does not say how much was left out")
        must(len(result.stdout) < 11_000, f"{len(result.stdout)} characters were kept")
        must(not (await sandbox.exec("echo short", timeout=10)).truncated, "a short output is said to be truncated")


@check()
async def callbacks_get_output_as_it_comes(bench: Bench) -> None:
    """They are called while the command runs, apart for both streams, and a character is never cut in two."""
    async with bench.sandbox() as sandbox:
        seen: dict[str, list[str]] = {"out": [], "err": []}
        arrived = asyncio.Event()

        def on_stdout(text: str) -> None:
            seen["out"].append(text)
            arrived.set()

        command = f"echo first; echo oops >&2; {WAIT_FOR_GO}; printf '\\303'; sleep 0.1; printf '\\274'"
        running = asyncio.create_task(
            sandbox.exec(command, timeout=20, on_stdout=on_stdout, on_stderr=seen["err"].append)
        )
        async with asyncio.timeout(10):
            await arrived.wait()
        must(not running.done(), "the command ended before it was allowed to")
        await sandbox.write_file("go", "")
        result = await running
        must_equal("".join(seen["out"]), "first\nü", "what the callback for standard output got")
        must_equal("".join(seen["err"]), "oops\n", "what the callback for standard error got")
        must_equal(result.stdout, "first\nü", "the result besides")


@check()
async def a_failing_callback_ends_the_command(bench: Bench) -> None:
    """The callback's own exception is raised, and the sandbox works on."""
    async with bench.sandbox() as sandbox:

        def fail(text: str) -> None:
            raise LookupError(text)

        async with asyncio.timeout(15):
            await refusal(sandbox.exec("echo x; sleep 1000", timeout=100, on_stdout=fail), LookupError, "a callback")
        must_equal((await sandbox.exec("echo ok", timeout=5)).stdout, "ok\n", "the sandbox afterwards")


async def _at_once(sandbox: AsyncSandbox, count: int) -> None:
    results = await asyncio.gather(
        *(sandbox.exec(f"echo {n}; echo e{n} >&2; exit {n % 7}", timeout=100) for n in range(count))
    )
    for n, result in enumerate(results):
        must_equal(
            (result.stdout, result.stderr, result.exit_code), (f"{n}\n", f"e{n}\n", n % 7), f"command {n} of {count}"
        )


@check()
async def fifty_commands_run_at_once(bench: Bench) -> None:
    """Each gets its own output and exit code."""
    async with bench.sandbox() as sandbox:
        await _at_once(sandbox, 50)


@check(slow=True)
async def two_hundred_commands_run_at_once_again_and_again(bench: Bench) -> None:
    """Each gets its own output and exit code, five times over."""
    async with bench.sandbox() as sandbox:
        for _ in range(5):
            await _at_once(sandbox, 200)


@check()
async def a_flood_does_not_stop_others(bench: Bench) -> None:
    """While one command writes without end, another answers."""
    async with bench.sandbox() as sandbox:
        flood = asyncio.create_task(sandbox.exec("cat /dev/zero", timeout=60, max_output_bytes=1000))
        for _ in range(10):
            async with asyncio.timeout(10):
                must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "a command beside a flood")
        must(not flood.done(), "the flood ended by itself")
        flood.cancel()
        await asyncio.wait([flood])


@check()
async def more_commands_than_are_remembered_can_run(bench: Bench) -> None:
    """Commands that were waited for leave nothing behind in the sandbox."""
    async with bench.sandbox() as sandbox:
        for _ in range(20):
            await asyncio.gather(*(sandbox.exec(["true"], timeout=20) for _ in range(10)))

        async def forgotten() -> bool:
            return not await sandbox.commands()

        await until(forgotten, "the sandbox remembers commands that were waited for")


@check(needs={Capability.ISOLATION}, without={Capability.USERS})
async def another_user_is_refused_where_there_is_none(bench: Bench) -> None:
    """Without the power to switch users, asking for another is an error, and nothing runs as the wrong one."""
    async with bench.sandbox() as sandbox:
        for user in ("root", "nobody", "12345"):
            await refusal(sandbox.exec("id -u", user=user, timeout=5), OSError, f"a command as {user}")


@check(needs={Capability.USERS})
async def commands_can_run_as_another_user(bench: Bench) -> None:
    """By name or number, with files that belong to that user."""
    async with bench.sandbox() as sandbox:
        must_equal((await sandbox.exec("id -u; id -g", user="12345:54321", timeout=5)).stdout, "12345\n54321\n", "ids")
        passwd = await sandbox.read_file("/etc/passwd") if await sandbox.exists("/etc/passwd") else ""
        line = next((line for line in passwd.splitlines() if line.startswith("nobody:")), None)
        if line is None:
            raise SkippedError("the image has no user 'nobody'")
        must_equal((await sandbox.exec("id -u", user="nobody", timeout=5)).stdout, f"{line.split(':')[2]}\n", "its id")


@check()
async def an_unknown_user_is_an_error(bench: Bench) -> None:
    """A user that does not exist is refused."""
    async with bench.sandbox() as sandbox:
        await refusal(sandbox.exec("id", user="no-such-user", timeout=5), OSError, "a command as an unknown user")
