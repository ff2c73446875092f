"""What stands around a sandbox of engine `process`, beside the walls that all engines have."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.sandbox.command import AsyncCommand
from atoll.sandbox.sandbox import AsyncSandbox
from security.conftest import Target, inside

PROCESS = pytest.mark.parametrize("target", ["process"], indirect=True)
_ADD_KEY, _KEYCTL, _JOIN, _SESSION = 248, 250, 1, -3
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def secret() -> Iterator[str]:
    """A key in the keyring of a session of this test's own, as a login leaves it."""
    text = os.urandom(8).hex()
    assert LIBC.syscall(_KEYCTL, _JOIN, None) > 0
    assert LIBC.syscall(_ADD_KEY, b"user", text.encode(), b"a secret", 8, _SESSION) > 0
    assert text in Path("/proc/keys").read_text()
    yield text
    LIBC.syscall(_KEYCTL, _JOIN, None)


KEYS = """
buffer = ctypes.create_string_buffer(100)
key = call(250, 10, -3, b"user", NAME.encode(), 0)
added, read = call(248, b"user", b"x", b"y", 1, -3), call(250, 11, max(key[0], 1), buffer, 100)
say([open("/proc/keys").read(), key[1], added[1], read[1]])
"""


@PROCESS
async def test_the_keys_of_our_session_stay_outside(target: Target, secret: str) -> None:
    async with target.sandbox() as sandbox:
        keys, *refused = await inside(sandbox, f"NAME = {secret!r}\n{KEYS}")
    assert secret not in keys
    assert refused == ["EPERM", "EPERM", "EPERM"]


CALLS = """
said = {}
for name, family, kind, protocol in (("vsock", 40, 1, 0), ("alg", 38, 5, 0), ("packet", 17, 3, 0), ("raw", 2, 3, 1)):
    try:
        socket.socket(family, kind, protocol)
        said[name] = "PWNED"
    except OSError as error:
        said[name] = errno.errorcode[error.errno]
said["core"] = resource.getrlimit(resource.RLIMIT_CORE)
said["userns"] = call(272, 0x10000000)[1]
said["io_uring"] = call(425, 8, 0)[1]
status = open("/proc/self/status").read()
said["filters"] = re.search(r"Seccomp:\\t(.*)", status)[1]
say(said)
"""


@PROCESS
async def test_it_has_the_filter_of_all_engines_and_leaves_no_core(target: Target) -> None:
    async with target.sandbox() as sandbox:
        assert await inside(sandbox, CALLS) == {
            "vsock": "EPERM", "alg": "EPERM", "packet": "EPERM", "raw": "EPERM", "userns": "EPERM",
            "io_uring": "ENOSYS", "core": [0, 0], "filters": "2",
        }  # fmt: skip


LOCK = """
import fcntl
with open(PATH) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        say("locked")
    except OSError:
        say("taken")
"""


async def waiting(sandbox: AsyncSandbox, program: str, word: str) -> AsyncCommand:
    """Start it, and go on once it has said the word."""
    command = await sandbox.start(program, stdin=True)
    async for piece in command:
        if word in piece.text:
            break
    return command


@PROCESS
@pytest.mark.parametrize("path", ["/usr/bin/env", "/etc/passwd", "/run/atoll/agent"])
async def test_files_that_all_sandboxes_see_carry_no_lock_from_one_to_another(target: Target, path: str) -> None:
    async with target.sandbox() as first, target.sandbox() as second:
        holder = await waiting(first, f"exec 9<{path}; flock -x 9; echo held; read -r end", "held")
        assert await inside(first, f"PATH = {path!r}\n{LOCK}") == "taken", "or the lock would show nothing"
        assert await inside(second, f"PATH = {path!r}\n{LOCK}") == "locked"
        if path == "/usr/bin/env":
            with open(path) as file:  # noqa: ASYNC230
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await holder.kill()


WATCH = """
import ctypes, os, sys
LIBC = ctypes.CDLL(None)
watch = LIBC.inotify_init1(os.O_NONBLOCK)
assert LIBC.inotify_add_watch(watch, b"/usr/bin/env", 0xfff) > 0
print("watching", flush=True)
for line in sys.stdin:
    try:
        print("heard", len(os.read(watch, 4096)) > 0, flush=True)
    except BlockingIOError:
        print("heard", False, flush=True)
"""


@PROCESS
async def test_what_is_read_in_usr_is_not_heard_by_others(target: Target) -> None:
    async with target.sandbox() as first, target.sandbox() as second:
        await first.write_file("watch.py", WATCH)
        watcher = await waiting(first, "exec python3 watch.py", "watching")
        for reader, heard in ((second, "False"), (None, "False"), (first, "True")):
            if reader is None:
                Path("/usr/bin/env").read_bytes()
            else:
                await reader.exec("cat /usr/bin/env >/dev/null")
            await watcher.send_stdin("\n")
            said = ""
            async for piece in watcher:
                said += piece.text
                if said.strip() and said.endswith("\n"):
                    break
            assert said.split() == ["heard", heard]
        await watcher.kill()
