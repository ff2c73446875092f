"""Hostile images at every step, a broken launcher, and a machine that has run out of something: an error that says the
step, and nothing left on the host."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.engines.host.cgroups.groups import Group
from atoll.engines.linux import construction
from atoll.engines.linux.native import launcher_process
from atoll.engines.linux.native_engine import NativeEngine
from atoll.errors import EngineError, ImageError, SandboxError
from atoll.images import Image, Kind
from atoll.model import SandboxSpec
from atoll.settings import Settings


def _link(name: str) -> Callable[[Path, Path], None]:
    def spoil(root: Path, victim: Path) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(victim)

    spoil.__name__ = f"link_{name.replace('/', '_')}"
    return spoil


def _climb(name: str) -> Callable[[Path, Path], None]:
    def spoil(root: Path, victim: Path) -> None:
        (root / name).symlink_to(f"../../../../../../../..{victim}")

    spoil.__name__ = f"climb_{name}"
    return spoil


def _file(name: str) -> Callable[[Path, Path], None]:
    def spoil(root: Path, victim: Path) -> None:
        (root / name).write_text("")

    spoil.__name__ = f"file_{name}"
    return spoil


def _magic(root: Path, victim: Path) -> None:
    (root / "workspace").symlink_to("/proc/1/root/tmp")


def _loop(root: Path, victim: Path) -> None:
    (root / "workspace").symlink_to("/workspace")


def _inner(root: Path, victim: Path) -> None:
    root.rmdir()
    root.symlink_to(victim)


STRICT = [_link("dev"), _link("proc"), _link("sys"), _climb("dev"), _climb("proc"), _climb("sys")]
STRICT += [_file("dev"), _file("proc"), _file("sys"), _loop, _magic, _inner, _file("workspace")]
HARMLESS = [_link("workspace"), _climb("tmp"), _link("root"), _link("dev/shm"), _link("dev/pts"), _link("sys/fs")]


@pytest.mark.parametrize("spoil", [*STRICT, *HARMLESS], ids=lambda spoil: spoil.__name__)
async def test_an_image_reaches_nothing_of_the_host(
    engine: NativeEngine, tmp_path: Path, spoil: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses such images when they come in; here one got past it."""
    victim, root = tmp_path / "victim", tmp_path / "image" / "rootfs"
    victim.mkdir()
    root.mkdir(parents=True)
    spoil(root, victim)

    async def acquire(reference: str, sandbox_id: str) -> Image:
        return Image("evil", Kind.TAR, layers=(root,))

    monkeypatch.setattr(engine.layout.images, "acquire", acquire)
    try:
        handle = await engine.create("a", SandboxSpec.of(image="tar:/evil"))
    except (ImageError, EngineError) as error:
        said = str(error)
    else:
        said = "could not be made: "
        assert spoil not in STRICT, "this image cannot have been right"
        await engine.delete(handle)
    assert "could not be made: " in said, "the step is missing"
    assert os.listdir(victim) == []
    assert await engine.list() == []
    assert not engine.layout.group("a").exists()


async def test_path_names_that_are_too_long_are_an_error(engine: NativeEngine, tmp_path: Path) -> None:
    for target in ("/" + "x" * 300, "/x" * 2100):
        volume = {"host": str(tmp_path), "path": target, "read_only": True}
        with pytest.raises(SandboxError, match=r"could not be made: put .*too long"):
            await engine.create("a", SandboxSpec.of(volumes=[volume]))
    assert await engine.list() == []


LAUNCHERS = {
    "hangs": "exec sleep 600",
    "fails": "exit 3",
    "dies": "kill -9 $$",
    "talks nonsense": "head -c 5000 /dev/urandom >&3; exit 0",
    "names nobody": "cat <&3 >/dev/null & echo -n ok 999999999 >&3; exit 0",
    "says it failed": "echo -n failed 28 overlay root >&3; exit 125",
    "daemonizes": "(exec 3>&-; setsid sleep 3 &) ; exec sleep 600",
}


@pytest.mark.parametrize("name", LAUNCHERS)
async def test_a_broken_launcher_is_an_error_and_leaves_nothing(
    engine: NativeEngine, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "atoll-native"
    script.write_text(f"#!/bin/bash\n{LAUNCHERS[name]}\n")
    script.chmod(0o755)
    monkeypatch.setattr(launcher_process, "program", lambda: script)
    monkeypatch.setattr(construction, "_CREATE_S", 2.0)
    with pytest.raises(EngineError):
        await engine.create("a", SandboxSpec())
    assert await engine.list() == []
    assert not engine.layout.group("a").exists()


async def test_a_missing_control_group_is_an_error_with_the_step(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if `gc` of another process had been faster."""
    monkeypatch.setattr(Group, "create", lambda self, limits, parents=True: None)
    with pytest.raises(EngineError, match=r"could not be made: group .*No such file"):
        await engine.create("a", SandboxSpec())
    assert await engine.list() == []


async def test_no_room_for_the_first_process_is_an_error(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Group, limits: object, *, parents: bool = True) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    monkeypatch.setattr(Group, "create", refuse)
    with pytest.raises(EngineError, match="No space left"):
        await engine.create("a", SandboxSpec())
    assert await engine.list() == []


async def test_too_little_memory_to_start_is_an_error(engine: NativeEngine) -> None:
    with pytest.raises(SandboxError):
        await engine.create("a", SandboxSpec.of(limits={"memory_bytes": 8192}))
    assert await engine.list() == []
    assert not engine.layout.group("a").exists()


def _told(frames: list[bytearray]) -> int:
    """The exit status of a launcher that gets these frames."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "rb") as null:
        actions = [(os.POSIX_SPAWN_DUP2, null.fileno(), number) for number in range(3)]
        actions.append((os.POSIX_SPAWN_DUP2, theirs.fileno(), 3))
        pid = os.posix_spawn(launcher_process.program(), ["atoll-native"], {}, file_actions=actions)
        theirs.close()
        content = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
        with contextlib.suppress(OSError):
            socket.send_fds(ours, [content], [null.fileno(), null.fileno()])
            ours.shutdown(socket.SHUT_WR)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_plan_that_forgets_to_map_ids_is_an_error(settings: Settings) -> None:
    """Its first process would wait for ever."""
    assert _told([bytearray(frame) for frame in (b"", b"", b"stage\x000\0first\0", b"", b"")]) == 125


@pytest.mark.timeout(60)
def test_a_launcher_that_is_told_nonsense_ends(settings: Settings) -> None:
    """The decoder takes any bytes: it reports an error or ends, and never makes a process that stays."""
    random.seed(4)
    good = [
        b"unshare\0" + b"0\0",
        b"stage\x000\0first\0",
        b"enter-stage\0/\x000\0proc\0proc\0ro\0",
        b"map\x000 1 1\n\x000 1 1\n\0",
    ]
    for _ in range(150):
        frames = [bytearray(random.choice([*good, os.urandom(40), b"", b"\0" * 9])) for _ in range(5)]
        for frame in frames:
            if frame and random.random() < 0.5:
                frame[random.randrange(len(frame))] = random.randrange(256)
        assert _told(frames) in (0, 125)
