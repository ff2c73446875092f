"""Small openings that were closed: each a way to be or to see what one should not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.host_image import host_view
from atoll.errors import SandboxError
from security.conftest import Target, inside

TARGETS = pytest.mark.parametrize("target", ["native", "runc", "runsc"], indirect=True)
NATIVE = pytest.mark.parametrize("target", ["native"], indirect=True)
EVERY = pytest.mark.parametrize("target", ["native", "process"], indirect=True)


@pytest.fixture
def usr(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What sandboxes take for the host's /usr."""
    path = Path(tempfile.mkdtemp(dir=folder))
    path.chmod(0o755)
    monkeypatch.setattr(host_view, "USR", path)
    yield path
    shutil.rmtree(path)


@TARGETS
async def test_what_only_root_of_the_host_may_read_below_usr_stays_closed(target: Target, usr: Path) -> None:
    (usr / "open").write_text("for all")
    (usr / "key").write_text("secret")
    (usr / "key").chmod(0o600)
    (usr / "group").write_text("secret")
    (usr / "group").chmod(0o640)
    (usr / "closed").mkdir()
    (usr / "closed" / "file").write_text("secret")
    (usr / "closed").chmod(0o700)
    async with target.sandbox() as sandbox:
        assert await sandbox.read_file("/usr/open") == "for all"
        assert (await sandbox.stat("/usr/open")).uid == 0, "it still belongs to root"
        for path in ("/usr/key", "/usr/group", "/usr/closed/file"):
            with pytest.raises(PermissionError):
                await sandbox.read_file(path)
        with pytest.raises(PermissionError):
            await sandbox.list_files("/usr/closed")


@NATIVE
async def test_a_number_is_always_a_uid(target: Target) -> None:
    async with target.sandbox() as sandbox:
        await sandbox.exec("printf '1000:x:0:0::/:/bin/sh\\nann:x:2000:2000::/home/ann:/bin/sh\\n' >>/etc/passwd")
        assert (await sandbox.exec("id -u", user="1000")).stdout == "1000\n"
        assert (await sandbox.exec("id -u; echo $HOME", user="2000")).stdout == "2000\n/home/ann\n"
        assert (await sandbox.exec("id -u", user="ann")).stdout == "2000\n"
        for user in ("00", "0000", "01000", "+0", " 0", "0x0", "1000:00", "4294967295", "4294967296"):
            with pytest.raises((SandboxError, OSError, ValueError)):
                await sandbox.exec("id -u", user=user)


SOCKETS = """
said = {}
for family in (2, 10):
    for kind, protocol in ((1, 262), (2, 136), (1, 132), (5, 132), (1, 256), (6, 33), (1, 99), (2, 99), (1, 58)):
        try:
            socket.socket(family, kind, protocol)
            said[f"{family} {kind} {protocol}"] = "open"
        except OSError as error:
            said[f"{family} {kind} {protocol}"] = errno.errorcode[error.errno]
try:
    socket.socket(43, 1, 0)
    said["smc"] = "open"
except OSError:
    pass
for kind, protocol in ((1, 0), (1, 6), (2, 0), (2, 17), (2, 1)):
    socket.socket(2, kind, protocol).close()
say(said)
"""


@EVERY
async def test_only_tcp_udp_and_ping_can_be_spoken(target: Target) -> None:
    async with target.sandbox() as sandbox:
        said = await inside(sandbox, SOCKETS.replace("(2, 1)", "(2, 17)") if target.name == "process" else SOCKETS)
    assert set(said.values()) <= {"EPROTONOSUPPORT", "EPERM"}
    assert said["2 1 262"] == "EPROTONOSUPPORT", "programs go on without MPTCP"


LISTED = """
import os, sys
name = sys.argv[1]
os.setgid(4242)
os.setuid(4242)
for base in sys.argv[2:]:
    for directory, names, files in os.walk(base):
        print(*(f"{directory}/{each}" for each in names + files if name in each), sep="\\n", end="")
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        if pid != str(os.getpid()) and name in open(f"/proc/{pid}/cmdline").read():
            print("command line of", pid)
    except OSError:
        pass
"""


@pytest.mark.parametrize("target", ["native", "runc", "process"], indirect=True)
async def test_local_users_find_no_list_of_sandboxes(target: Target) -> None:
    if isinstance(target.engine, LinuxEngine):
        groups = [str(path) for path in target.engine.layout.hierarchy.controllers.values()]
    else:
        groups = []
    async with target.sandbox() as sandbox:
        places = [str(target.settings.data_dir), str(target.settings.run_dir), *groups]
        command = [sys.executable, "-c", LISTED, sandbox.id, *places]
        if not os.access(sys.executable, os.X_OK) or "/root/" in os.path.realpath(sys.executable):
            command[0] = "/usr/bin/python3"
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)  # noqa: ASYNC221
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
