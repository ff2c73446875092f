"""Persistent shells: commands one after another, with directory, variables and functions kept in between."""

# ruff: noqa: S604 (`shell` is the name of a shell in a sandbox)
from __future__ import annotations

import asyncio

from atoll.conformance import host
from atoll.conformance.bench import Bench, new_mark
from atoll.conformance.check import check
from atoll.conformance.findings import must, must_equal, refusal
from atoll.conformance.inside import until_gone, until_running
from atoll.errors import SandboxError, SandboxTimeoutError
from atoll.model import Cause
from atoll.sandbox.sandbox import AsyncSandbox


async def _still_works(sandbox: AsyncSandbox, after: str) -> None:
    async with asyncio.timeout(20):
        must_equal(await sandbox.run_command("echo works", 10), "works", f"the shell after {after}")


@check()
async def it_remembers(bench: Bench) -> None:
    """Directory, variables, functions, aliases and options survive from one call to the next."""
    async with bench.sandbox() as sandbox:
        top = await sandbox.run_command("pwd", 10)
        await sandbox.run_command("mkdir -p sub; cd sub; export A=1; B=2; greet() { echo hello $1; }; set -f", 10)
        must_equal(await sandbox.run_command("pwd", 10), f"{top}/sub", "the directory")
        must_equal(await sandbox.run_command("echo $A$B; sh -c 'echo [$A$B]'", 10), "12\n[1]", "the variables")
        must_equal(await sandbox.run_command("greet you", 10), "hello you", "the function")
        must_equal(await sandbox.run_command("echo *", 10), "*", "the option")


@check()
async def exit_codes_are_known(bench: Bench) -> None:
    """`run` on a shell gives the exit code of every command, and `$?` is that of the one before."""
    async with bench.sandbox() as sandbox:
        shell = sandbox.shell()
        for code in (0, 1, 42, 255):
            result = await shell.run(f"(exit {code})", 10)
            must_equal((result.exit_code, result.cause), (code, Cause.EXIT), "the exit code")
        await shell.run("(exit 9)", 10)
        must_equal((await shell.run("echo $?", 10)).stdout, "9\n", "the exit code of the command before")
        must_equal((await shell.run("no-such-program", 10)).exit_code, 127, "the exit code of a missing program")
        must_equal((await shell.run("sh -c 'kill -9 $$'", 10)).exit_code, 137, "the exit code of a killed program")


@check()
async def a_command_that_dies_of_a_signal_is_no_trouble_of_the_shell(bench: Bench) -> None:
    """The shell may say that it was killed, but complains of nothing else."""
    async with bench.sandbox() as sandbox:
        text = await sandbox.run_command("sh -c 'kill -9 $$'; echo $?", 10)
        must_equal(text.replace("Killed", "").strip(), "137", "what a killed command leaves")


@check()
async def both_streams_come_in_order(bench: Bench) -> None:
    """The text is what a person would see: standard output and errors together."""
    async with bench.sandbox() as sandbox:
        text = await sandbox.run_command("echo 1; echo 2 >&2; echo 3; sh -c 'echo 4 >&2'", 10)
        must_equal(text, "1\n2\n3\n4", "the output")


@check()
async def any_text_can_be_typed(bench: Bench) -> None:
    """Several lines, here-documents, quotes, backslashes, comments, unicode and very long lines."""
    cases = {
        "echo one\necho two": "one\ntwo",
        "for i in 1 2\ndo\n  echo $i\ndone": "1\n2",
        "cat <<EOF\na 'b' \"c\" $((1+1))\nEOF": "a 'b' \"c\" 2",
        "cat <<'EOF'\n$HOME `x` \\\nEOF\necho after": "$HOME `x` \\\nafter",
        "echo \"it's\" 'a \"b\"' \\\\ \\'": "it's a \"b\" \\ '",
        "echo a # comment": "a",
        "# only a comment": "",
        "": "",
        "   \n\n  ": "",
        "echo 'line\n\nline'": "line\n\nline",
        "echo größe 日本 🏝": "größe 日本 🏝",
        "echo 'tab\tx'": "tab\tx",
        "echo !! '!x'": "!! !x",
        "echo 'a;b' && echo c & wait": "a;b\nc",
        "printf 'no newline'": "no newline",
        "printf '\\n\\nx\\n\\n'": "\n\nx",
        f"echo {'x' * 50_000}": "x" * 50_000,
        "case a in a) echo yes;; esac": "yes",
        "{ echo grouped; }": "grouped",
        "echo $((6*7)) $(echo sub) `echo old`": "42 sub old",
    }
    async with bench.sandbox() as sandbox:
        for command, expected in cases.items():
            found = await sandbox.run_command(command, 10)
            if "wait" in command:  # an interactive shell announces the job at a time of its own choice
                found = "\n".join(line for line in found.splitlines() if not line.startswith("["))
            must_equal(found, expected, f"the output of {command[:60]!r}")


@check()
async def output_that_looks_like_a_prompt_is_output(bench: Bench) -> None:
    """The end of a command is never guessed from what it writes."""
    async with bench.sandbox() as sandbox:
        for text in ("$ ", "# ", "user@host:~$ ", ">>> ", "0\n0\n0\n", "\x1b[0m$ "):
            result = await sandbox.shell().run(f"printf %s '{text}'; sleep 0.05; printf end; (exit 3)", 10)
            must_equal((result.stdout, result.exit_code), (f"{text}end", 3), f"a command that writes {text!r}")


@check()
async def a_prompt_of_ones_own_changes_nothing(bench: Bench) -> None:
    """Setting the variables that make a prompt, as many scripts do, neither hangs nor shows."""
    async with bench.sandbox() as sandbox:
        for command in ("PS1='> '", "PS2=x", "PROMPT_COMMAND='true'", "unset PROMPT_COMMAND", "unset PS1 PS4"):
            async with asyncio.timeout(30):
                await sandbox.run_command(command, 8)
                result = await sandbox.shell().run("echo ok; (exit 3)", 8)
            must_equal((result.stdout, result.exit_code), ("ok\n", 3), f"a command after {command!r}")


@check()
async def other_descriptors_are_left_alone(bench: Bench) -> None:
    """A command that opens or closes descriptors of its own does not cut the shell off."""
    async with bench.sandbox() as sandbox:
        for command in (
            "exec 9>&-",
            "exec 9>/dev/null",
            "echo x >&9",
            "exec 3>three; echo x >&3; exec 3>&-",
            "exec 2>&1",
        ):
            async with asyncio.timeout(30):
                await sandbox.shell().run(command, 8)
                result = await sandbox.shell().run("echo ok; (exit 3)", 8)
            must_equal((result.stdout, result.exit_code), ("ok\n", 3), f"a command after {command!r}")


@check()
async def huge_output_is_truncated_visibly(bench: Bench) -> None:
    """Thirty megabytes end with a result that says what is missing, and the shell goes on."""
    async with bench.sandbox() as sandbox:
        async with asyncio.timeout(40):
            result = await sandbox.shell().run("head -c 30000000 /dev/zero | tr '\\0' x; echo; echo end; (exit 4)", 30)
        must(result.truncated and "bytes left out" in result.stdout, "the truncation is not visible")
        must(result.stdout.endswith("x\nend\n"), "the end of the output is missing")
        must_equal(result.exit_code, 4, "the exit code")
        await _still_works(sandbox, "a huge output")


@check()
async def bytes_that_are_no_text_are_kept(bench: Bench) -> None:
    """Output that is not UTF-8 comes back byte by byte."""
    async with bench.sandbox() as sandbox:
        result = await sandbox.shell().run("printf '\\377\\376\\000x'", 10)
        must_equal(result.stdout_bytes, b"\xff\xfe\x00x", "the bytes")


@check()
async def commands_find_no_input(bench: Bench) -> None:
    """What reads its input gets the end of file at once, and never eats what is typed next."""
    async with bench.sandbox() as sandbox:
        async with asyncio.timeout(20):
            must_equal(await sandbox.run_command("cat; echo done", 10), "done", "a command that reads")
            must_equal(await sandbox.run_command("read x; echo [$x]", 10), "[]", "a builtin that reads")
            must_equal(await sandbox.run_command("while read x; do echo $x; done; echo end", 10), "end", "a loop")
        await _still_works(sandbox, "commands that read")


@check()
async def a_timeout_kills_the_command_and_keeps_the_shell(bench: Bench) -> None:
    """SandboxTimeoutError with the output so far; directory, variables and functions are still there."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        await sandbox.run_command("mkdir -p d; cd d; value=kept; f() { echo f; }", 10)
        where = await sandbox.run_command("pwd", 10)
        async with asyncio.timeout(20):
            error = await refusal(
                sandbox.run_command(f"echo so far; sleep {mark}; echo never", 0.5), SandboxTimeoutError, "a timeout"
            )
        must(isinstance(error, TimeoutError), "SandboxTimeoutError is not a TimeoutError")
        must(error.output.startswith("so far\n"), f"the output so far is missing: {error.output!r}")
        must("never" not in error.output, "the shell went on with the rest of the line after the timeout")
        await until_gone(sandbox, mark, "the command still runs after its timeout")
        must_equal(await sandbox.run_command("pwd; echo $value; f", 10), f"{where}\nkept\nf", "the shell's state")


@check()
async def a_timeout_takes_the_whole_tree_of_the_command(bench: Bench) -> None:
    """Also what called setsid and ignores signals dies, and the shell's state stays."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        await sandbox.run_command("value=kept", 10)
        command = f"sh -c \"trap '' TERM INT HUP; setsid sleep {mark} & sleep {mark}\""
        async with asyncio.timeout(20):
            await refusal(sandbox.run_command(command, 0.5), SandboxTimeoutError, "a timeout")
        await until_gone(sandbox, mark, "processes of the command still run after its timeout")
        must_equal(host.processes(mark), [], "the processes seen from the host")
        must_equal(await sandbox.run_command("echo $value", 10), "kept", "the shell's state")


@check()
async def an_endless_loop_of_the_shell_itself_is_stopped(bench: Bench) -> None:
    """A loop of builtins has no process to kill: the shell is interrupted and keeps its state."""
    async with bench.sandbox() as sandbox:
        await sandbox.run_command("value=kept", 10)
        for command in ("while :; do :; done", "while true; do x=1; done; echo never"):
            async with asyncio.timeout(20):
                await refusal(sandbox.run_command(command, 0.4), SandboxTimeoutError, f"{command!r}")
            must_equal(await sandbox.run_command("echo $value", 10), "kept", f"the shell's state after {command!r}")


@check()
async def a_shell_that_ignores_interrupts_is_replaced(bench: Bench) -> None:
    """A command that cannot be interrupted costs the shell its state, and nobody has to wait."""
    async with bench.sandbox() as sandbox:
        async with asyncio.timeout(30):
            await refusal(
                sandbox.run_command("trap '' INT TERM; while :; do :; done", 0.4), SandboxTimeoutError, "the command"
            )
        await _still_works(sandbox, "a command that ignores interrupts")


@check()
async def nothing_of_a_timed_out_command_is_in_the_next_answer(bench: Bench) -> None:
    """Late output and late exit codes belong to nobody."""
    async with bench.sandbox() as sandbox:
        await sandbox.run_command("value=kept", 10)
        for _ in range(5):
            attempt = sandbox.run_command("while :; do echo noise; sleep 0.01; done", 0.2)
            await refusal(attempt, SandboxTimeoutError, "a noisy command")
            result = await sandbox.shell().run("echo $value; (exit 5)", 10)
            must_equal((result.stdout, result.exit_code), ("kept\n", 5), "the answer after a noisy command")


@check()
async def the_rest_of_a_timed_out_line_never_runs(bench: Bench) -> None:
    """What stands behind the command that took too long is given up with it, however that command dies."""
    stuck = (
        "sleep 1000",
        "sh -c \"trap '' INT TERM; sleep 1000\"",
        "sh -c 'trap \"exit 0\" INT TERM USR1; while :; do sleep 0.02; done'",
        "setsid sleep 1000",
        "f() { g; touch ran-function; }; g() { sleep 1000; }; f",
        "( sleep 1000; touch ran-subshell )",
        "sleep 1000 | cat",
        "x=$(sleep 1000; echo y)",
    )
    async with bench.sandbox() as sandbox:
        await sandbox.run_command("value=kept", 10)
        for command in stuck:
            async with asyncio.timeout(20):
                line = f"{command}; touch ran-after\ntouch ran-later"
                await refusal(sandbox.run_command(line, 0.2), SandboxTimeoutError, f"{command!r}")
            must_equal([info.path for info in await sandbox.list_files()], [], f"what ran after {command!r}")
            must_equal(await sandbox.run_command("echo $value", 10), "kept", f"the shell's state after {command!r}")


@check()
async def a_cancelled_call_leaves_a_working_shell(bench: Bench) -> None:
    """Cancelling kills the command; the next call is answered with its own output only."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        await _still_works(sandbox, "its start")
        task = asyncio.create_task(sandbox.run_command(f"echo early; sleep {mark}; echo late", 60))

        await until_running(sandbox, f"sleep {mark}")
        task.cancel()
        await asyncio.wait([task])
        await _still_works(sandbox, "a cancelled call")
        await until_gone(sandbox, f"sleep {mark}", "a cancelled command still runs")


@check()
async def bad_syntax_is_an_error_and_nothing_more(bench: Bench) -> None:
    """Unclosed quotes, missing words and half a here-document end at once with a message; the state stays."""
    async with bench.sandbox() as sandbox:
        await sandbox.run_command("value=kept", 10)
        for command in (
            "if then",
            "echo 'open",
            'echo "open',
            "for",
            "(",
            ")",
            "echo $(",
            "cat <<EOF\nx",
            "echo `x",
            "&&",
        ):
            async with asyncio.timeout(20):
                result = await sandbox.shell().run(command, 8)
            must_equal(result.cause, Cause.EXIT, f"how {command!r} ends")
            if not command.startswith("cat"):
                must(result.exit_code != 0, f"{command!r} should fail")
            must_equal(await sandbox.run_command("echo $value", 10), "kept", f"the shell's state after {command!r}")


@check()
async def exit_starts_a_new_shell(bench: Bench) -> None:
    """`exit` gives its code and ends what the shell knew; the next command finds a fresh one in the work directory."""
    async with bench.sandbox() as sandbox:
        top = await sandbox.run_command("pwd", 10)
        for leave, code in (("exit 3", 3), ("exec true", 0), ("exec sh -c 'exit 5'", 5), ("kill -9 $$", 137)):
            await sandbox.run_command("cd /; value=old", 10)
            async with asyncio.timeout(20):
                result = await sandbox.shell().run(f"echo bye; {leave}", 10)
            # Some shells say "exit" when they are left.
            must_equal((result.stdout[:4], result.exit_code), ("bye\n", code), f"the result of {leave!r}")
            must_equal(await sandbox.run_command("pwd; echo [$value]", 10), f"{top}\n[]", f"the shell after {leave!r}")


@check()
async def a_shell_that_is_killed_is_an_error(bench: Bench) -> None:
    """`run_command` gives a text: that the shell died in the middle cannot be seen in it, so it is raised."""
    async with bench.sandbox() as sandbox:
        for command, said in (("kill -9 $$", ""), ("echo bye; kill -9 $$", "bye")):
            error = await refusal(sandbox.run_command(command, 10), SandboxError, f"{command!r}")
            must("killed" in str(error) and said in str(error), f"the error: {error}")
            must_equal(await sandbox.run_command("echo on", 10), "on", "the next command")
        await sandbox.run_command("exit 3", 10)  # leaving the shell is no failure


@check()
async def errexit_ends_the_shell_as_it_says(bench: Bench) -> None:
    """After `set -e` a failing command ends the shell with its code; a new one is there for the next."""
    async with bench.sandbox() as sandbox:
        await sandbox.run_command("set -e", 10)
        async with asyncio.timeout(20):
            result = await sandbox.shell().run("echo before; (exit 7); echo after", 10)
        must_equal((result.stdout, result.exit_code), ("before\n", 7), "the result")
        await _still_works(sandbox, "set -e")


@check()
async def a_job_in_the_background_lives_on(bench: Bench) -> None:
    """It neither delays the answer nor dies with the command that started it, and can be waited for later."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        async with asyncio.timeout(20):
            text = await sandbox.run_command(f"sleep {mark} & job=$!; echo started", 10)
        must(text.endswith("started"), f"the answer: {text!r}")
        await until_running(sandbox, mark)
        result = await sandbox.shell().run("kill -9 $job; wait $job", 10)
        must_equal(result.exit_code, 137, "the exit code of the job")
        await until_gone(sandbox, mark, "the job still runs")


@check()
async def callers_take_turns(bench: Bench) -> None:
    """Concurrent calls on one shell run one after another, each with its own answer."""
    async with bench.sandbox() as sandbox:
        calls = (sandbox.run_command(f"n=$((n+1)); echo {i} begin; sleep 0.01; echo {i} end", 30) for i in range(20))
        answers = await asyncio.gather(*calls)
        for number, answer in enumerate(answers):
            must_equal(answer, f"{number} begin\n{number} end", f"the answer of call {number}")
        must_equal(await sandbox.run_command("echo $n", 10), "20", "the number of calls that ran")


@check()
async def named_shells_are_independent(bench: Bench) -> None:
    """Each has its own state, and a busy one does not hold up another."""
    async with bench.sandbox() as sandbox:
        await sandbox.run_command("value=one", 10, shell="one")
        await sandbox.run_command("value=two; cd /", 10, shell="two")
        must_equal(await sandbox.run_command("echo $value", 10, shell="one"), "one", "the variable of the first")
        must_equal(await sandbox.run_command("echo $value; pwd", 10, shell="two"), "two\n/", "the state of the second")
        busy = asyncio.create_task(
            sandbox.run_command("while [ ! -e go ]; do sleep 0.02; done; echo went", 30, shell="one")
        )
        must_equal(await sandbox.run_command("echo free", 10, shell="two"), "free", "a shell beside a busy one")
        await sandbox.write_file("go", "")
        must_equal(await busy, "went", "the busy shell")
        await sandbox.shell("one").close()
        must_equal(await sandbox.run_command("echo [$value]", 10, shell="one"), "[]", "a shell that was closed")


@check()
async def a_subshell_does_not_confuse_it(bench: Bench) -> None:
    """Shells started as commands end at once for want of input, and leave the outer one as it was."""
    async with bench.sandbox() as sandbox:
        await sandbox.run_command("value=kept", 10)
        for command in ("sh", "sh -i 2>/dev/null", "( value=inner; exit 4 )"):
            async with asyncio.timeout(20):
                await sandbox.shell().run(command, 10)
            must_equal(await sandbox.run_command("echo $value", 10), "kept", f"the shell after {command!r}")


@check()
async def a_zero_byte_is_refused(bench: Bench) -> None:
    """ValueError for what no shell could read, and for impossible timeouts."""
    async with bench.sandbox() as sandbox:
        await refusal(sandbox.run_command("echo \0", 5), ValueError, "a zero byte")
        for timeout in (0, -1, float("nan")):
            await refusal(sandbox.run_command("true", timeout), ValueError, f"a timeout of {timeout}")
        await _still_works(sandbox, "bad input")
