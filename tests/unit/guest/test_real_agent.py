"""Everything again with the real agent at the other end: commands, their input, output and end."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
from contextlib import suppress

import pytest

from atoll.errors import AgentUnreachableError
from atoll.guest import CompletedProcess, FollowedProcess, Guest, StartRequest
from atoll.model import Cause
from unit.guest.conftest import RealAgent
from unit.guest.scripted import eventually

pytestmark = pytest.mark.timeout(20)

_ids = itertools.count()


def new_id() -> bytes:
    return b"test-%d" % next(_ids)


async def shell(guest: Guest, command: str, *, stdin: bytes | None = None, limit: int = 1 << 20) -> CompletedProcess:
    return await guest.processes.run(StartRequest(new_id(), shell=command), limit_bytes=limit, stdin=stdin)


async def read_until(process: FollowedProcess, text: bytes) -> bytes:
    """Single pieces, so that the rest is still there for whoever comes next."""
    seen = b""
    while text not in seen:
        seen += (await process.__anext__()).data
    return seen


async def test_the_agent_says_who_it_is(guest: Guest, agent: RealAgent) -> None:
    hello = await guest.hello()
    assert hello.pid == agent.pid
    assert len(hello.instance) == 16
    assert guest.instance == hello.instance
    stats = await guest.stats()
    assert stats.connections == 1
    assert 0 < stats.rss_bytes < 16 << 20
    assert stats.processes >= 1


async def test_a_command_runs_with_output_exit_code_and_usage(guest: Guest) -> None:
    done = await shell(guest, "echo out; echo err >&2; exit 3")
    assert (done.stdout.value(), done.stderr.value()) == (b"out\n", b"err\n")
    assert (done.exit.cause, done.exit.exit_code, done.exit.signal) == (Cause.EXIT, 3, None)
    assert done.exit.ends == (4, 4, 0)
    assert done.exit.pid > 0
    assert 0 < done.exit.duration_s < 20
    assert done.exit.max_rss_bytes > 0


async def test_arguments_environment_and_directory_reach_the_command(guest: Guest, agent: RealAgent) -> None:
    (agent.root / "sub").mkdir()
    request = StartRequest(
        new_id(),
        argv=["sh", "-c", 'printf "%s|" "$@" "$A" "$PWD"', "sh", "", "a b", b"\xff"],
        env={"A": "1=2"},
        cwd=str(agent.root / "sub"),
    )
    done = await guest.processes.run(request, limit_bytes=1000)
    assert done.stdout.value() == b"|a b|\xff|1=2|" + os.fsencode(agent.root / "sub") + b"|"


async def test_a_missing_or_unusable_program_is_a_result(guest: Guest, agent: RealAgent) -> None:
    (agent.root / "data").write_text("x")
    missing = await guest.processes.run(StartRequest(new_id(), argv=["no-such-program"]), limit_bytes=1000)
    unusable = await guest.processes.run(StartRequest(new_id(), argv=["./data"]), limit_bytes=1000)
    assert (missing.exit.exit_code, unusable.exit.exit_code) == (127, 126)
    assert missing.stderr.value()
    process = await guest.processes.start(StartRequest(new_id(), argv=["no-such-program"]))
    assert (await process.wait()).exit_code == 127


async def test_a_directory_or_user_that_does_not_work_is_an_error(guest: Guest) -> None:
    with pytest.raises(FileNotFoundError):
        await guest.processes.run(StartRequest(new_id(), shell="true", cwd="/no/such"), limit_bytes=10)
    with pytest.raises(OSError, match=r"user|argument|such"):
        await guest.processes.run(StartRequest(new_id(), shell="true", user="no-such-user"), limit_bytes=10)


async def test_a_signal_is_told(guest: Guest) -> None:
    done = await shell(guest, "kill -11 $$")
    assert (done.exit.cause, done.exit.signal, done.exit.exit_code) == (Cause.SIGNAL, signal.SIGSEGV, None)


@pytest.mark.parametrize("size", [0, 1, 262_144, 262_145, 5_000_000])
async def test_input_of_any_size_comes_back(guest: Guest, size: int) -> None:
    data = os.urandom(size)
    done = await shell(guest, "cat", stdin=data, limit=size + 10)
    assert done.stdout.value() == data


async def test_a_command_need_not_read_its_input(guest: Guest) -> None:
    assert (await shell(guest, "exit 5", stdin=bytes(3_000_000))).exit.exit_code == 5


async def test_a_flood_of_output_is_cut_and_counted(guest: Guest) -> None:
    done = await shell(guest, "head -c 30000000 /dev/zero; echo end", limit=1000)
    assert done.stdout.total == 30_000_004
    assert done.stdout.value().endswith(b"end\n")
    assert b"[29999004 bytes left out]" in done.stdout.value()


async def test_output_is_told_as_it_comes(guest: Guest) -> None:
    seen: list[tuple[int, bytes]] = []
    request = StartRequest(new_id(), shell="echo a; echo b >&2; echo s >&9", status=True)
    await guest.processes.run(request, limit_bytes=100, on_output=lambda channel, data: seen.append((channel, data)))
    assert sorted(seen) == [(1, b"a\n"), (2, b"b\n"), (3, b"s\n")]


async def test_merged_output_keeps_its_order(guest: Guest) -> None:
    request = StartRequest(new_id(), shell="for i in 1 2 3; do echo $i; echo $i >&2; done", merge=True)
    done = await guest.processes.run(request, limit_bytes=100)
    assert (done.stdout.value(), done.stderr.value()) == (b"1\n1\n2\n2\n3\n3\n", b"")


async def test_a_deadline_takes_the_whole_tree(guest: Guest) -> None:
    command = "setsid sleep 1000 & echo $!; trap '' TERM; sleep 1000"
    request = StartRequest(new_id(), shell=command, deadline_s=0.3, grace_s=0.05)
    done = await guest.processes.run(request, limit_bytes=100)
    assert done.exit.cause is Cause.TIMEOUT
    assert not _alive(int(done.stdout.value()))


async def test_killing_takes_the_whole_tree_and_says_so(guest: Guest) -> None:
    id = new_id()
    process = await guest.processes.start(StartRequest(id, shell="setsid sleep 1000 & echo $!; wait"))
    child = int(await read_until(process, b"\n"))
    assert _alive(child)
    await guest.processes.kill(id)
    assert not _alive(child)
    assert (await process.wait()).cause is Cause.KILLED
    with pytest.raises(FileNotFoundError):
        await guest.processes.kill(b"no such id")


async def test_a_process_can_be_spared_while_its_children_are_killed(guest: Guest) -> None:
    id = new_id()
    process = await guest.processes.start(StartRequest(id, shell="sleep 1000; echo survived"))
    await eventually(lambda: _children(process.pid))
    await guest.processes.kill(id, spare=True)
    assert b"survived" in await read_until(process, b"survived")


async def test_other_signals_reach_the_process(guest: Guest) -> None:
    process = await guest.processes.start(
        StartRequest(new_id(), shell="trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.01; done")
    )
    await read_until(process, b"ready")
    process.signal(signal.SIGUSR1)
    await read_until(process, b"caught")
    assert (await process.wait()).exit_code == 7


async def test_input_can_be_given_piece_by_piece(guest: Guest) -> None:
    process = await guest.processes.start(StartRequest(new_id(), argv=["cat"], stdin=True))
    await process.send_stdin(b"one")
    assert await read_until(process, b"one") == b"one"
    await process.send_stdin(b"two")
    await process.close_stdin()
    assert b"".join([output.data async for output in process]) == b"two"
    assert (await process.wait()).exit_code == 0
    with pytest.raises(BrokenPipeError):
        await process.send_stdin(b"late")


async def test_a_terminal_has_a_size_that_can_change(guest: Guest) -> None:
    process = await guest.processes.start(
        StartRequest(new_id(), argv=["sh"], stdin=True, pty=(24, 80), env={"PS1": "", "TERM": "dumb"})
    )
    await process.send_stdin(b"stty size; test -t 0 && echo is-a-$((1))-tty\n")
    seen = await read_until(process, b"is-a-1-tty")
    assert b"24 80" in seen
    process.resize(30, 100)
    await process.send_stdin(b"stty size; echo do$((1))ne\n")
    assert b"30 100" in await read_until(process, b"do1ne")
    await process.close_stdin()
    assert (await process.wait()).exit_code == 0


async def test_a_slow_reader_loses_nothing(guest: Guest) -> None:
    process = await guest.processes.start(StartRequest(new_id(), shell="seq 300000"))
    data = bytearray()
    async for output in process:
        data += output.data
        if len(data) % 7 == 0:
            await asyncio.sleep(0)
    assert bytes(data) == b"".join(b"%d\n" % n for n in range(1, 300_001))
    assert (await process.wait()).ends[0] == len(data) == process.offsets[0]


async def test_waiting_alone_does_not_block_the_process(guest: Guest) -> None:
    process = await guest.processes.start(StartRequest(new_id(), shell="head -c 5000000 /dev/zero"))
    assert (await process.wait()).ends[0] == 5_000_000
    assert process.offsets[0] == 5_000_000


async def test_output_survives_a_lost_connection(guest: Guest, agent: RealAgent) -> None:
    id = new_id()
    os.mkfifo(agent.root / "fifo")
    process = await guest.processes.start(StartRequest(id, shell="echo first; read x < fifo; echo $x"))
    await read_until(process, b"first\n")
    await guest.aclose()
    with pytest.raises(AgentUnreachableError):
        await process.wait()
    again = await guest.processes.attach(id, (process.offsets[0], process.offsets[1], process.offsets[2]))
    assert (again.pid, again.dropped) == (process.pid, 0)
    await asyncio.to_thread((agent.root / "fifo").write_text, "second\n")
    assert b"".join([output.data async for output in again]) == b"second\n"
    assert (await again.wait()).exit_code == 0


async def test_a_command_asked_for_twice_runs_once(guest: Guest, agent: RealAgent) -> None:
    request = StartRequest(new_id(), shell="echo x >> count; echo answer")
    for _ in range(2):
        done = await guest.processes.run(request, limit_bytes=100)
        assert done.stdout.value() == b"answer\n"
        await guest.aclose()
    assert (agent.root / "count").read_text() == "x\n"


async def test_what_was_no_longer_kept_is_counted(guest: Guest) -> None:
    id = new_id()
    request = StartRequest(id, shell="echo start; sleep 0.2; head -c 1000000 /dev/zero", keep_bytes=4096)
    process = await guest.processes.start(request)
    await read_until(process, b"start\n")
    process.detach()
    await _ended(guest, id)
    again = await guest.processes.attach(id)
    assert again.dropped >= 800_000
    rest = [len(output.data) async for output in again]
    assert sum(rest) + again.dropped == 1_000_006
    assert again.offsets[0] == (await again.wait()).ends[0] == 1_000_006
    done = await guest.processes.run(StartRequest(id, shell="not run again"), limit_bytes=10_000)
    assert done.stdout.total == 1_000_006
    assert done.stdout.missing == again.dropped


async def test_a_second_listener_takes_over(guest: Guest) -> None:
    id = new_id()
    first = await guest.processes.start(StartRequest(id, shell="echo a; sleep 0.2; echo b"))
    second = await guest.processes.attach(id)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        await first.wait()
    assert caught.value.errno == errno.ESTALE
    assert b"".join([output.data async for output in second]) == b"a\nb\n"


async def test_a_detached_process_goes_on(guest: Guest, agent: RealAgent) -> None:
    id = new_id()
    process = await guest.processes.start(StartRequest(id, shell="sleep 0.1; echo done > result", detach=True))
    assert process.pid > 0
    with pytest.raises(RuntimeError, match="detached"):
        await process.wait()
    assert (await (await guest.processes.attach(id)).wait()).exit_code == 0
    assert (agent.root / "result").read_text() == "done\n"


async def test_ended_processes_are_listed_until_they_are_released(guest: Guest) -> None:
    id, other = new_id(), new_id()
    running = await guest.processes.start(StartRequest(other, shell="sleep 100"))
    await guest.processes.run(StartRequest(id, shell="true"), limit_bytes=10)
    listed = {info.id: info for info in await guest.processes.list()}
    assert not listed[id].running
    assert listed[other].running
    assert listed[other].pid == running.pid
    with pytest.raises(OSError) as caught:  # noqa: PT011
        await guest.processes.release(other)
    assert caught.value.errno == errno.EBUSY
    await guest.processes.release(id)
    await _listed_only(guest, other)
    with pytest.raises(FileNotFoundError):
        await guest.processes.attach(id)
    await guest.processes.kill(other)
    while [info.running for info in await guest.processes.list()] == [True]:
        pass  # its tree is gone; the agent has yet to hear of its own child
    guest.processes.release_soon(other)
    await _listed_only(guest)


async def test_cancelling_a_run_kills_what_it_started(guest: Guest, agent: RealAgent) -> None:
    id = new_id()
    run = guest.processes.run(StartRequest(id, shell="echo $$ > pid; sleep 1000; :"), limit_bytes=10)
    task = asyncio.create_task(run)
    pid = agent.root / "pid"
    await eventually(lambda: pid.exists() and pid.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with suppress(ProcessLookupError):  # it is dead already
        await guest.processes.kill(id)
    assert not _alive(int(pid.read_text()))


async def test_many_commands_run_at_once(guest: Guest) -> None:
    done = await asyncio.gather(*(shell(guest, f"echo {number}") for number in range(60)))
    assert [int(result.stdout.value()) for result in done] == list(range(60))


async def test_limits_reach_the_process(guest: Guest) -> None:
    request = StartRequest(new_id(), shell="ulimit -n", rlimits=[(7, 33, 44)])
    assert (await guest.processes.run(request, limit_bytes=100)).stdout.value() == b"33\n"


async def _listed_only(guest: Guest, *ids: bytes) -> None:
    """Wait until these are all: a process that was released goes when its own supervisor has ended, too."""
    while [info.id for info in await guest.processes.list()] != list(ids):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def _ended(guest: Guest, id: bytes) -> None:
    while any(info.running for info in await guest.processes.list() if info.id == id):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _alive(pid: int) -> bool:
    """Running: one that only waits to be reaped is not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children(pid: int) -> str:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read()
