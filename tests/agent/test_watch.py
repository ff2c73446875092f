"""Watching directories: nothing is left out in silence."""

from __future__ import annotations

import errno
import os

import pytest

from agent.client import WATCHED, Connection
from agent.conftest import Agent
from atoll.guest.frames import WINDOW, EventKind, FrameType, Op, Tag

CREATED, MODIFIED, REMOVED, MOVED_AWAY, MOVED_HERE, ATTRIBUTES, LOST = range(1, 8)
Seen = tuple[int, bool, bytes]


class Watch:
    def __init__(self, host: Connection, path: str, recursive: bool = False) -> None:
        self.host = host
        self.stream = host.open(Op.WATCH, [(Tag.PATH, path), (Tag.FLAGS, int(recursive))])
        self._rest = b""
        host.event(self.stream, EventKind.READY)

    def until(self, wanted: Seen) -> list[Seen]:
        """All that comes up to this one."""
        seen: list[Seen] = []
        while wanted not in seen:
            self._rest += self.host.next(self.stream).payload
            while len(self._rest) >= WATCHED.size:
                what, folder, length = WATCHED.unpack_from(self._rest)
                end = WATCHED.size + length
                if len(self._rest) < end:
                    break
                seen.append((what, bool(folder), self._rest[WATCHED.size : end]))
                self._rest = self._rest[end:]
        return seen


def test_what_happens_in_a_directory(agent: Agent, host: Connection) -> None:
    watch = Watch(host, ".")
    (agent.root / "f").write_text("x")
    (agent.root / "f").chmod(0o600)
    (agent.root / "f").rename(agent.root / "g")
    (agent.root / "g").unlink()
    seen = watch.until((REMOVED, False, b"g"))
    expected = [(CREATED, b"f"), (MODIFIED, b"f"), (ATTRIBUTES, b"f"), (MOVED_AWAY, b"f"), (MOVED_HERE, b"g")]
    at = [seen.index((what, False, path)) for what, path in expected]
    assert at == sorted(at)
    (agent.root / "d").mkdir()
    (agent.root / "d" / "below").write_text("")
    (agent.root / "last").write_text("")
    assert b"d/below" not in {path for _, _, path in watch.until((CREATED, False, b"last"))}


def test_a_tree_with_new_directories(agent: Agent, host: Connection) -> None:
    (agent.root / "old" / "deep").mkdir(parents=True)
    watch = Watch(host, ".", recursive=True)
    (agent.root / "old" / "deep" / "f").write_text("x")
    watch.until((MODIFIED, False, b"old/deep/f"))
    for n in range(30):  # made faster than they can be watched: what is in them is found all the same
        (agent.root / f"n{n}" / "a" / "b").mkdir(parents=True)
        (agent.root / f"n{n}" / "a" / "b" / "f").write_text("x")
        watch.until((CREATED, False, f"n{n}/a/b/f".encode()))
    (agent.root / "n3" / "a" / "b" / "f").unlink()
    watch.until((REMOVED, False, b"n3/a/b/f"))


def test_a_directory_that_moves(agent: Agent, host: Connection) -> None:
    (agent.root / "in" / "d" / "e").mkdir(parents=True)
    (agent.root / "out").mkdir()
    watch = Watch(host, "in", recursive=True)
    (agent.root / "in" / "d").rename(agent.root / "in" / "moved")
    watch.until((MOVED_HERE, True, b"moved"))
    (agent.root / "in" / "moved" / "e" / "f").write_text("")
    watch.until((CREATED, False, b"moved/e/f"))
    (agent.root / "in" / "moved").rename(agent.root / "out" / "gone")
    watch.until((MOVED_AWAY, True, b"moved"))
    host.hello()
    (agent.root / "out" / "gone" / "e" / "unseen").write_text("")
    (agent.root / "in" / "last").write_text("")
    assert not [path for _, _, path in watch.until((CREATED, False, b"last")) if b"unseen" in path]


def test_links_are_not_followed(agent: Agent, host: Connection) -> None:
    (agent.root / "out").mkdir()
    (agent.root / "in").mkdir()
    (agent.root / "in" / "link").symlink_to("../out")
    watch = Watch(host, "in", recursive=True)
    (agent.root / "in" / "link2").symlink_to("../out")
    (agent.root / "out" / "unseen").write_text("")
    (agent.root / "in" / "last").write_text("")
    assert not [path for _, _, path in watch.until((CREATED, False, b"last")) if b"unseen" in path]


def test_the_end_of_the_watched_directory_is_told(agent: Agent, host: Connection) -> None:
    (agent.root / "d").mkdir()
    watch = Watch(host, "d")
    (agent.root / "d").rmdir()
    watch.until((REMOVED, True, b""))
    host.send(FrameType.CLOSE, watch.stream)
    assert host.finish(watch.stream).errno == errno.ECANCELED


def test_what_cannot_be_kept_up_with_is_told(agent: Agent) -> None:
    """The host takes nothing until more has happened than is kept for it."""
    host = agent.connect(grant=False)
    watch = Watch(host, ".", recursive=True)
    name = "n" * 240
    for n in range(3500):
        os.close(os.open(agent.root / f"{name}{n:05}", os.O_CREAT | os.O_WRONLY))
    host.hello()
    host.grant = True
    host.give_credit(watch.stream, WINDOW)
    seen = watch.until((LOST, False, b""))
    assert {what for what, _, _ in seen} <= {CREATED, MODIFIED, LOST}
    assert len(seen) < 7000
    (agent.root / "after").write_text("")
    watch.until((CREATED, False, b"after"))


@pytest.mark.parametrize("path", ["nothing", "f"])
def test_what_is_no_directory_is_not_watched(agent: Agent, host: Connection, path: str) -> None:
    (agent.root / "f").write_text("")
    stream = host.open(Op.WATCH, [(Tag.PATH, path)])
    assert host.finish(stream).errno in (errno.ENOENT, errno.ENOTDIR)
