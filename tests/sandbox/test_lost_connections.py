"""The connection to the agent is lost: whoever waits gets an answer, and the next use connects again."""

from __future__ import annotations

import asyncio

import pytest

from atoll import AgentUnreachableError, AsyncSandbox


def cut(sandbox: AsyncSandbox) -> None:
    """As if the socket broke. There is no public way to do that, so this one looks inside."""
    connection = sandbox.access.guest.current_connection()
    assert connection is not None
    connection.fail(AgentUnreachableError("cut by the test"))


async def test_the_next_use_connects_again(sandbox: AsyncSandbox) -> None:
    await sandbox.write_file("file", "content")
    for _ in range(3):
        cut(sandbox)
        assert (await sandbox.exec("echo ok")).stdout == "ok\n"
        cut(sandbox)
        assert await sandbox.read_file("file") == "content"


async def test_exec_gets_the_whole_answer_all_the_same(sandbox: AsyncSandbox) -> None:
    running = asyncio.create_task(sandbox.exec("echo one; while [ ! -e go ]; do sleep 0.02; done; echo two; exit 3"))
    await sandbox.exec("true")
    cut(sandbox)
    await sandbox.write_file("go", "")
    result = await running
    assert (result.stdout, result.exit_code) == ("one\ntwo\n", 3)


async def test_a_background_command_is_followed_without_a_gap(sandbox: AsyncSandbox) -> None:
    command = await sandbox.start("for i in $(seq 1 2000); do echo line $i; done; sleep 0.1; echo end")
    pieces = []
    cuts = 0
    async for piece in command:
        pieces.append(piece.data)
        # What had arrived before the cut is handed out first, without a connection.
        if cuts < 2 and sandbox.access.guest.current_connection() is not None:
            cut(sandbox)
            cuts += 1
    assert cuts == 2
    assert b"".join(pieces).decode() == "".join(f"line {number}\n" for number in range(1, 2001)) + "end\n"
    assert (await command.wait()).exit_code == 0


async def test_input_goes_on(sandbox: AsyncSandbox) -> None:
    command = await sandbox.start("cat", stdin=True)
    await command.send_stdin("one ")
    output = aiter(command)
    assert (await anext(output)).text == "one "
    cut(sandbox)
    await command.send_stdin("two")
    await command.close_stdin()
    assert (await command.wait()).stdout == "one two"


async def test_the_shell_keeps_its_state(sandbox: AsyncSandbox) -> None:
    await sandbox.run_command("value=kept")
    cut(sandbox)
    assert await sandbox.run_command("echo $value") == "kept"


async def test_a_command_in_the_shell_gets_the_whole_answer(sandbox: AsyncSandbox) -> None:
    await sandbox.run_command("value=kept")
    line = "echo one; while [ ! -e go ]; do sleep 0.02; done; echo two; (exit 3)"
    running = asyncio.create_task(sandbox.shell().run(line, 30))
    await sandbox.exec("true")
    for _ in range(3):
        cut(sandbox)
        await sandbox.exec("true")
    await sandbox.write_file("go", "")
    result = await running
    assert (result.stdout, result.exit_code) == ("one\ntwo\n", 3)
    assert await sandbox.run_command("echo $value") == "kept"


async def test_a_terminal_goes_on(sandbox: AsyncSandbox) -> None:
    terminal = await sandbox.open_terminal("while read x; do echo got-$x; done")
    await terminal.write("a\n")
    seen = b""
    while b"got-a" not in seen:
        seen += await anext(aiter(terminal))
    cut(sandbox)
    await terminal.write("b\n")
    while b"got-b" not in seen:
        seen += await anext(aiter(terminal))
    await terminal.kill()


async def test_a_caller_that_waits_is_told(sandbox: AsyncSandbox) -> None:
    """With callbacks the answer cannot be asked for again: they would hear everything twice."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    running = asyncio.create_task(sandbox.exec("echo one; sleep 100", on_stdout=heard.put_nowait))
    assert await heard.get() == "one\n"
    cut(sandbox)
    with pytest.raises(AgentUnreachableError):
        await running
    assert heard.empty()
