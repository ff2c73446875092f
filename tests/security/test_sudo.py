"""Sudo gives root to the account `user` and to nobody else, in every kind of sandbox; without the option to nobody."""

from __future__ import annotations

import pytest

from atoll.errors import UnsupportedError
from atoll.sandbox.sandbox import AsyncSandbox
from security.conftest import Target

KINDS = pytest.mark.parametrize(
    "target", ["native", pytest.param("runc", marks=pytest.mark.again), "runsc"], indirect=True
)
SUDO = "/run/atoll/sudo"
ACCOUNTS = "user:x:1000:1000::/home/user:/bin/sh\nother:x:1001:1001::/tmp:/bin/sh\n"
RUDE = """
import array, os, socket, struct
for forged in (None, 0, 1000, 1001):
    line = socket.socket(socket.AF_UNIX)
    line.connect("/run/atoll/sudo.socket")
    line.settimeout(10)
    try:
        line.recv(1)
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        if forged is not None:
            sent.append((socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("iII", os.getpid(), forged, forged)))
        word = b"\\x02\\x00\\x07\\x00\\x00\\x00/bin/id"
        line.sendmsg([struct.pack("II", 0x31647573, len(word)) + word], sent)
        print("answer", line.recv(8).hex())
    except OSError as error:
        print("refused", error.errno)
"""


async def prepared(sandbox: AsyncSandbox) -> None:
    lines = [line for line in (await sandbox.read_file("/etc/passwd")).splitlines() if "user:" not in line]
    await sandbox.write_file("/etc/passwd", "\n".join(lines) + "\n" + ACCOUNTS)


@KINDS
async def test_the_account_user_becomes_root_and_no_other_one(target: Target) -> None:
    async with target.sandbox(sudo=True) as sandbox:
        await prepared(sandbox)
        assert (await sandbox.exec(f"echo x | {SUDO} sh -c 'id -u; cat'", user="user")).stdout == "0\nx\n"
        big = await sandbox.exec(f"{SUDO} sh -c 'echo ${{#0}}' {'y' * 120_000}", user="user")
        assert big.stdout == "120000\n", big.stderr
        refused = await sandbox.exec(f"{SUDO} id -u", user="other")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "may not become another one" in refused.stderr
        rude = await sandbox.exec(["python3", "-c", RUDE], user="other")
        assert rude.success, rude.stderr
        assert "uid=" not in rude.stdout
        assert all(line == "answer " or line.startswith(("answer 03", "refused")) for line in rude.stdout.splitlines())
        assert (await sandbox.exec(f"{SUDO} id -u", user="user")).stdout == "0\n", "it goes on for those who may"
        found = await sandbox.exec("ls -l /run/atoll/sudo")
        assert found.stdout.startswith("-rwxr-xr-x 1 root root"), "there is no set-id file"


@KINDS
async def test_after_a_rollback_and_in_a_fork_it_is_allowed_again(target: Target) -> None:
    async with target.peer(sudo=True) as sandbox:
        await prepared(sandbox)
        await sandbox.rollback(await sandbox.checkpoint())
        assert (await sandbox.exec(f"{SUDO} id -u", user="user")).stdout == "0\n"
        (fork,) = await sandbox.fork()
        async with fork:
            assert (await fork.exec(f"{SUDO} id -u", user="user")).stdout == "0\n"


@pytest.mark.parametrize("target", ["native"], indirect=True)
async def test_without_the_option_nobody_may(target: Target) -> None:
    async with target.sandbox() as sandbox:
        assert not await sandbox.exists("/run/atoll")
    async with target.sandbox(sudo=True) as allowed:
        await prepared(allowed)
        program = await allowed.read_bytes(SUDO)
    async with target.sandbox() as sandbox:
        await prepared(sandbox)
        await sandbox.write_file("/tmp/sudo", program, mode=0o755)
        refused = await sandbox.exec("/tmp/sudo id -u", user="user")
        assert (refused.exit_code, refused.stderr) == (1, "sudo: this sandbox was made without the option 'sudo'\n")
        assert (await sandbox.exec("/tmp/sudo id -u", user="0")).stdout == "0\n", "root needs no help"


@pytest.mark.parametrize("target", ["process"], indirect=True)
async def test_where_there_is_one_user_it_is_refused(target: Target) -> None:
    with pytest.raises(UnsupportedError, match="have one user"):
        await target.sandbox(sudo=True).create()
    assert await target.engine.list() == []
