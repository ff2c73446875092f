"""Programs on a terminal of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll.conformance.bench import Bench, new_mark
from atoll.conformance.check import check
from atoll.conformance.findings import must, must_equal, refusal
from atoll.conformance.inside import until_gone, until_running
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.sandbox.terminal import AsyncTerminal


class _Screen:
    """A terminal with the output that has not been matched yet."""

    def __init__(self, terminal: AsyncTerminal) -> None:
        self.terminal = terminal
        self.text = ""
        self._pieces = aiter(terminal)

    async def shows(self, wanted: str) -> None:
        """Wait until the terminal has shown this, and discard all output up to it."""
        try:
            async with asyncio.timeout(15):
                while wanted not in self.text:
                    self.text += (await anext(self._pieces)).decode(errors="replace")
        except (TimeoutError, StopAsyncIteration) as error:
            raise AssertionError(f"the terminal does not show {wanted!r}, but {self.text!r}") from error
        self.text = self.text.partition(wanted)[2]

    async def ends(self) -> int:
        async with asyncio.timeout(15):
            async for piece in self._pieces:
                self.text += piece.decode(errors="replace")
            return await self.terminal.wait()


@asynccontextmanager
async def _screen(
    sandbox: AsyncSandbox, command: str | list[str] | None = None, rows: int = 24, columns: int = 80
) -> AsyncIterator[_Screen]:
    terminal = await sandbox.open_terminal(command, rows=rows, columns=columns)
    try:
        yield _Screen(terminal)
    finally:
        await terminal.kill()


@check()
async def it_is_a_terminal(bench: Bench) -> None:
    """The program sees one on all three descriptors, with the size that was asked for, and can open it by name."""
    async with bench.sandbox() as sandbox:
        command = "test -t 0 && test -t 1 && test -t 2 && echo tty yes; stty size; echo named >/dev/tty; echo $TERM"
        async with _screen(sandbox, command, rows=33, columns=101) as screen:
            await screen.shows("tty yes\r\n33 101\r\nnamed\r\nxterm-256color\r\n")
            must_equal(await screen.ends(), 0, "the exit code")


@check()
async def typing_reaches_the_program(bench: Bench) -> None:
    """What is written is its input, echoed as on any terminal; Ctrl-D is the end of it."""
    async with bench.sandbox() as sandbox:
        async with _screen(sandbox, "while read -r line; do echo got-$line; done; echo over; exit 6") as screen:
            await screen.terminal.write("größe\n")
            await screen.shows("größe\r\n")
            await screen.shows("got-größe\r\n")
            await screen.terminal.write("\x04")
            await screen.shows("over\r\n")
            must_equal(await screen.ends(), 6, "the exit code")


@check()
async def its_size_can_be_changed(bench: Bench) -> None:
    """The program is told with SIGWINCH and sees the new size."""
    async with bench.sandbox() as sandbox:
        async with _screen(sandbox, "trap 'stty size' WINCH; echo up; while :; do sleep 0.02; done") as screen:
            await screen.shows("up\r\n")
            await screen.terminal.resize(50, 132)
            await screen.shows("50 132\r\n")
            for rows, columns in ((0, 80), (24, 0), (-1, 5), (24, 100_000)):
                await refusal(screen.terminal.resize(rows, columns), ValueError, f"a terminal of {rows} x {columns}")


@check()
async def control_c_interrupts(bench: Bench) -> None:
    """It reaches the program in the foreground as SIGINT."""
    async with bench.sandbox() as sandbox:
        async with _screen(
            sandbox, "trap 'echo interrupted; exit 7' INT; echo up; while :; do sleep 0.02; done"
        ) as screen:
            await screen.shows("up\r\n")
            await screen.terminal.write("\x03")
            await screen.shows("interrupted\r\n")
            must_equal(await screen.ends(), 7, "the exit code")
        async with _screen(sandbox, ["sleep", "1000"]) as screen:
            await screen.terminal.write("\x03")
            must_equal(await screen.ends(), 130, "the exit code of a program that is interrupted")


@check()
async def a_program_can_take_the_whole_screen(bench: Bench) -> None:
    """In raw mode every key reaches it as it is, also Ctrl-C and Ctrl-D, without an echo."""
    async with bench.sandbox() as sandbox:
        command = "stty raw -echo; printf ready; head -c 4 | od -An -tx1; stty sane; exit 8"
        async with _screen(sandbox, command) as screen:
            await screen.shows("ready")
            await screen.terminal.write(b"\x03\x04q\xff")
            must_equal(await screen.ends(), 8, "the exit code")
            must_equal(screen.text.split(), ["03", "04", "71", "ff"], "the keys that the program got")


@check()
async def without_a_command_it_is_a_shell(bench: Bench) -> None:
    """An interactive one, in the work directory, with job control and no complaint about it."""
    async with bench.sandbox() as sandbox:
        where = (await sandbox.exec("pwd", timeout=10)).stdout.strip()
        mark = new_mark()
        async with _screen(sandbox) as screen:
            await screen.terminal.write("echo at=$(pwd)=\n")
            await screen.shows(f"at={where}=")
            await screen.terminal.write(f"sleep {mark}\n")
            await until_running(sandbox, f"sleep {mark}")
            await screen.terminal.write("\x03")
            await screen.terminal.write("echo code=$?=\n")
            await screen.shows("code=130=")
            await screen.terminal.write("exit 5\n")
            must_equal(await screen.ends(), 5, "the exit code of the shell")
            must("job control" not in screen.text, f"the shell complains: {screen.text!r}")


@check()
async def killing_it_ends_everything(bench: Bench) -> None:
    """Also what was started from it and left the terminal."""
    async with bench.sandbox() as sandbox:
        mark = new_mark()
        terminal = await sandbox.open_terminal(f"trap '' HUP TERM; setsid sleep {mark} & sleep {mark}")
        await until_running(sandbox, mark)
        await terminal.kill()
        await until_gone(sandbox, mark, "processes of a killed terminal still run")
        async with asyncio.timeout(10):
            must_equal(await terminal.wait(), 137, "the exit code of a killed terminal")
        await terminal.kill()


@check()
async def much_output_is_complete(bench: Bench) -> None:
    """Half a megabyte through a terminal arrives in full before its end."""
    async with bench.sandbox() as sandbox:
        async with _screen(
            sandbox,
            "i=0; while [ $i -lt 10000 ]; do echo 'line of fifty characters of the terminal xxxx' $i; i=$((i+1)); done",
        ) as screen:
            must_equal(await screen.ends(), 0, "the exit code")
            lines = screen.text.split("\r\n")
            must_equal((len(lines), lines[9999].split()[-1]), (10_001, "9999"), "the number of lines and the last one")


@check()
async def several_are_independent(bench: Bench) -> None:
    """Each terminal has its own program, size and keyboard."""
    async with bench.sandbox() as sandbox:
        async with _screen(sandbox, "read x; echo one-$x") as one, _screen(sandbox, "read x; echo two-$x") as two:
            await two.terminal.write("b\n")
            await two.shows("two-b")
            await one.terminal.write("a\n")
            await one.shows("one-a")


@check()
async def a_program_that_is_missing_is_127(bench: Bench) -> None:
    """With its message on the terminal."""
    async with bench.sandbox() as sandbox:
        async with _screen(sandbox, ["no-such-program"]) as screen:
            must_equal(await screen.ends(), 127, "the exit code")
            must("no-such-program" in screen.text, f"the terminal shows {screen.text!r}")
