"""The status channel: in order with the output before it, and never held back by a flood."""

from __future__ import annotations

from agent.client import Answer, Connection
from agent.conftest import Agent
from atoll.guest.frames import FrameType, Op, StartFlag, Tag


def test_a_status_comes_after_the_output_before_it(host: Connection) -> None:
    stream = host.start(
        "a", "for i in $(seq 200); do head -c 3000 /dev/zero; echo $i >&9; done", flags=StartFlag.STATUS
    )
    seen = 0
    answer = Answer()
    while not answer.frames or answer.last.type is not FrameType.END:
        frame = host.next(stream)
        answer.add(frame)
        for line in answer.status.split()[seen:] if frame.channel == 3 else []:
            seen += 1
            if answer.status.endswith(b"\n"):
                assert len(answer.stdout) >= int(line) * 3000
    assert answer.status.split() == [str(n).encode() for n in range(1, 201)]


def test_a_status_that_comes_while_another_is_read_overtakes_no_output(host: Connection) -> None:
    program = "import os\nfor i in range(1, 30001): os.write(1, b'x'); os.write(9, b'%d\\n' % i)"
    stream = host.start("a", f'exec python3 -c "{program}"', flags=StartFlag.STATUS)
    answer = Answer()
    while not answer.frames or answer.last.type is not FrameType.END:
        answer.add(host.next(stream))
        complete = answer.status.rpartition(b"\n")[0].rpartition(b"\n")[2] if answer.last.channel == 3 else b"0"
        assert len(answer.stdout) >= int(complete or 0)
    assert answer.status.endswith(b"\n30000\n")


def test_a_status_is_not_held_back_by_a_flood(agent: Agent) -> None:
    host = agent.connect(grant=False)
    stream = host.start("a", "cat /dev/zero & sleep 0.2; echo now >&9; sleep 100", flags=StartFlag.STATUS)
    frames = 0
    while (frame := host.next(stream)).channel != 3:
        host.give_credit(stream, len(frame.payload))
        frames += 1
    assert frame.payload == b"now\n"
    agent.connect().kill("a")


def test_a_status_while_nobody_listens_to_a_flood(agent: Agent) -> None:
    host = agent.connect()
    host.run(
        "a",
        "cat /dev/zero & for i in $(seq 50); do echo $i >&9; sleep 0.01; done",
        flags=StartFlag.STATUS | StartFlag.DETACH,
    )
    for _ in range(50):
        host.hello()
    attached = host.open(Op.ATTACH, [(Tag.ID, "a"), (Tag.OFFSET_1, 1 << 60)])
    host.until(attached, b"50\n", channel=3)
    host.kill("a")
