"""Named volumes between hostile sandboxes of one user, and what they could do to the host or to other users."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.errors import ConflictError, SandboxError
from atoll.model.spec import OWNER_LABEL
from security.conftest import Target, inside

_RUNC, _GVISOR = (pytest.param(name, marks=pytest.mark.again) for name in ("runc", "runsc"))
_CRUN = pytest.param("crun", marks=pytest.mark.slow)
NAMESPACES = pytest.mark.parametrize("target", ["native", _RUNC, _CRUN], indirect=True)
IDS = pytest.mark.parametrize("target", ["native", _RUNC, _CRUN, _GVISOR], indirect=True)

BTRFS = """
import fcntl
def asked(number, argument=0):
    try:
        fcntl.ioctl(fd, number, argument)
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]
os.makedirs("/v/d", exist_ok=True)
fd = os.open("/v", os.O_RDONLY | os.O_DIRECTORY)
name = bytearray(struct.pack("q4088s", fd, b"sub"))
v2 = bytearray(struct.pack("qQQQQ16x4040s", fd, 0, 0, 0, 0, b"sub2"))
said = {
    "create": asked(0x5000940E, name), "create v2": asked(0x50009418, v2), "snapshot": asked(0x50009401, name),
    "snapshot v2": asked(0x50009417, v2), "destroy": asked(0x5000940F, name), "sync": asked(0x9408),
    "start sync": asked(0x80089418, bytearray(8)), "defrag": asked(0x50009402, name),
    "quota": asked(0xC0109428, bytearray(16)), "limit": asked(0x8030942B, bytearray(48)),
    "search": asked(0xD0009411, bytearray(4096)), "look up": asked(0xD0009412, bytearray(4096)),
    "look up, user": asked(0xD000943E, bytearray(4096)), "info": asked(0x81F8943C, bytearray(504)),
}
say(said)
"""
"""What btrfs offers to anybody who has opened a directory of it."""


@contextlib.asynccontextmanager
async def volume(target: Target, name: str = "data", owner: str = "") -> AsyncIterator[str]:
    yield name
    await target.linux.remove_volume(name, owner=owner)


def read_as(user: int, path: Path) -> bytes:
    """Return what `cat` complains about when an ordinary user of the host reads this file."""
    return subprocess.run(
        ["cat", path], user=user, group=user, extra_groups=(), capture_output=True, check=False
    ).stderr


def data_of(target: Target, name: str) -> Path:
    volumes = target.linux.layout.volumes
    return volumes.use("", name, "test", read_only=True)


@NAMESPACES
async def test_nothing_inside_reaches_the_calls_of_btrfs(target: Target) -> None:
    """A subvolume of its own would be counted by no limit, and the volume could not be removed."""
    async with volume(target) as name, target.sandbox(volumes={name: "/v"}) as sandbox:
        said = await inside(sandbox, BTRFS)
        assert set(said.values()) == {"ENOTTY"}, said
        copied = await sandbox.exec("echo x > /v/a; cp --reflink=auto /v/a /v/b && cat /v/b", timeout=20)
        assert copied.stdout == "x\n"


@IDS
async def test_a_set_uid_program_in_a_volume_is_none_and_unreachable(target: Target) -> None:
    async with volume(target) as name:
        async with target.sandbox(volumes={name: "/v"}) as sandbox:
            made = await sandbox.exec(
                "cp /usr/bin/id /v/id && chmod 6755 /v/id && chown 1000:1000 /v /v/id && chmod 6755 /v/id", timeout=20
            )
            assert made.success, made.stderr
            ran = await sandbox.exec(["/v/id", "-u"], user="1234", timeout=20)
            assert ran.stdout == "1234\n"
        found = data_of(target, name) / "id"
        assert (found.stat().st_uid, found.stat().st_mode & 0o7000) == (1000, 0o6000)
        for user in (1000, 65534):
            assert b"Permission denied" in await asyncio.to_thread(read_as, user, found)


@IDS
async def test_links_pipes_and_sockets_lead_nowhere(target: Target, host_secret: Path) -> None:
    """What one sandbox leaves in a volume, another meets inside its own walls."""
    async with volume(target) as name:
        async with target.sandbox(volumes={name: "/v"}) as one:
            left = await one.exec(
                f"cd /v; ln -s {host_secret} secret; ln -s ../../../../.. up; mkfifo pipe; mknod null c 1 3;"
                "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'; ls",
                timeout=20,
            )
            assert "null" not in left.stdout.split()
            async with target.sandbox(volumes={name: "/other"}) as other:
                for attempt in ("cat /other/secret", "cat /other/up" + str(host_secret), "ls /other/up/../../v"):
                    assert not (await other.exec(attempt, timeout=20)).success, attempt
                seen = (await other.exec("ls /other/up/other", timeout=20)).stdout.split()
                assert {"secret", "up"} <= set(seen) <= set(left.stdout.split())
                with pytest.raises((OSError, ValueError, SandboxError)):
                    await other.read_file("/other/secret")


@IDS
async def test_another_owner_cannot_name_the_volume(target: Target) -> None:
    async with volume(target, owner="ann") as name:
        async with target.sandbox(volumes={name: "/v"}, labels=None) as mine:
            await mine.exec("echo mine > /v/file", timeout=20)
        await target.linux.create_volume(name, owner="ann")
        assert await target.linux.volumes(owner="eve") == []
        with pytest.raises(SandboxError, match="reserved"):
            target.sandbox(volumes={name: "/v"}, labels={OWNER_LABEL: "ann"})
        for wrong in (f"ann/{name}", f"../{name}", f"@{'0' * 40}", f"{name}\0", f"{name}/../{name}"):
            with pytest.raises((SandboxError, OSError, ValueError)):
                async with target.sandbox(volumes=[f"{wrong}:/v"]):
                    pass
    await target.linux.remove_volume("data")


@NAMESPACES
async def test_a_mount_table_shows_no_name_and_no_owner(target: Target) -> None:
    async with volume(target, "very-secret-name") as name, target.sandbox(volumes={name: "/v"}) as sandbox:
        table = (await sandbox.exec("cat /proc/self/mountinfo", timeout=20)).stdout
        assert "/v " in table
        assert name not in table
        assert str(target.settings.data_dir) not in table


@NAMESPACES
async def test_a_volume_is_removed_or_mounted_and_never_both(target: Target) -> None:
    """While sandboxes are made that mount it, it is removed again and again. Whoever gets it can write and read."""
    stop = asyncio.Event()

    async def remove() -> int:
        removed = 0
        while not stop.is_set():
            try:
                await target.linux.remove_volume("data")
                removed += 1
            except ConflictError:
                await asyncio.sleep(0)
        return removed

    async def use() -> None:
        for _ in range(4):
            async with target.peer(volumes={"data": "/v"}) as sandbox:
                done = await sandbox.exec("echo x > /v/file && cat /v/file", timeout=20)
                assert done.stdout == "x\n", done.stderr

    removing = asyncio.create_task(remove())
    try:
        await asyncio.gather(*(use() for _ in range(3)))
    finally:
        stop.set()
    assert await removing
    await target.linux.remove_volume("data")
    assert await target.linux.volumes() == []


@NAMESPACES
async def test_a_full_volume_is_the_cause_of_a_failed_command(target: Target) -> None:
    async with volume(target) as name:
        await target.linux.create_volume(name, size_bytes=8 << 20)
        async with target.sandbox(volumes={name: "/v"}) as sandbox:
            failed = await sandbox.exec("head -c 32m /dev/urandom > /v/big && sync /v/big", timeout=30)
            assert not failed.success
            assert failed.cause == "disk_full"
            neighbour = await sandbox.exec("head -c 1m /dev/urandom > own; sync own; rm /v/big", timeout=30)
            assert neighbour.success
