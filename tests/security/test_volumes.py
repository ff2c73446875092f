"""Volumes that a sandbox may write to. What it leaves there is on the host's disk, where the sandbox's walls do not
stand: no file of root's, and nobody's set-uid program. On its own files the same bits work."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from atoll.engines.linux import construction
from atoll.engines.linux.plan.id_ranges import VOLUME_IDS
from atoll.errors import SandboxError, SpecError
from security.conftest import Target, inside
from security.owned_volumes import GROUP, MAPPED, OWNER, SUPERVISED, special, volume_of

ALL = pytest.mark.parametrize(
    "target", ["native", "runc", pytest.param("crun", marks=pytest.mark.slow), "runsc", "process"], indirect=True
)

BITS = r"""
import shutil
os.chdir(PLACE)
os.umask(0)
def fresh(name):
    shutil.copyfile("/usr/bin/cat", name)
    os.chmod(name, 0o755)
    return name
def attempted(function, *arguments):
    try:
        function(*arguments)
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]
def tried(number, *arguments):
    return call(number, *arguments)[1] or "ok"
said = {}
for mode in (0o4755, 0o2755, 0o6755):
    said[f"chmod {mode:o}"] = attempted(os.chmod, fresh(f"chmod-{mode:o}"), mode)
    fd = os.open(fresh(f"fchmod-{mode:o}"), os.O_RDONLY)
    said[f"fchmod {mode:o}"] = attempted(os.fchmod, fd, mode)
    here = os.open(".", os.O_RDONLY)
    fresh(f"fchmodat-{mode:o}")
    said[f"fchmodat {mode:o}"] = attempted(lambda: os.chmod(f"fchmodat-{mode:o}", mode, dir_fd=here))
    fd = os.open(fresh(f"proc-{mode:o}"), os.O_RDONLY)
    said[f"proc {mode:o}"] = attempted(os.chmod, f"/proc/self/fd/{fd}", mode)
    fresh(f"fchmodat2-{mode:o}")
    said[f"fchmodat2 {mode:o}"] = tried(452, -100, f"fchmodat2-{mode:o}".encode(), mode, 0)
    fd = os.open(fresh(f"empty-{mode:o}"), os.O_RDONLY)
    said[f"fchmodat2 empty {mode:o}"] = tried(452, fd, b"", mode, 0x1000)
    said[f"open {mode:o}"] = attempted(os.open, f"open-{mode:o}", os.O_CREAT | os.O_WRONLY, mode)
    said[f"creat {mode:o}"] = tried(85, f"creat-{mode:o}".encode(), mode)
    said[f"mknod {mode:o}"] = attempted(os.mknod, f"mknod-{mode:o}", stat.S_IFREG | mode)
    how = struct.pack("<QQQ", os.O_CREAT | os.O_WRONLY, mode, 0)
    said[f"openat2 {mode:o}"] = tried(437, -100, f"openat2-{mode:o}".encode(), how, len(how))
    os.symlink(fresh(f"target-{mode:o}"), f"link-{mode:o}")
    said[f"link {mode:o}"] = attempted(os.chmod, f"link-{mode:o}", mode)
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_WRONLY, mode)
        os.link(f"/proc/self/fd/{fd}", f"tmpfile-{mode:o}")
    except OSError as error:
        said[f"tmpfile {mode:o}"] = errno.errorcode[error.errno]
    own = fresh("/tmp/own")
    said[f"own {mode:o}"] = attempted(os.chmod, own, mode)
    for step in (os.link, os.rename):
        attempted(step, own, f"{step.__name__}-{mode:o}")
    subprocess.run(["cp", "-p", own, f"cp-{mode:o}"], stderr=subprocess.DEVNULL)
    os.chdir("/tmp")
    subprocess.run(["tar", "cpf", "own.tar", "own"])
    os.chdir(PLACE)
    os.makedirs(f"tar-{mode:o}", exist_ok=True)
    subprocess.run(["tar", "xpf", "/tmp/own.tar", "-C", f"tar-{mode:o}"], stderr=subprocess.DEVNULL)
header = struct.pack("<IIIII", 0x02000001, 0xff, 0, 0, 0)
said["capability"] = attempted(os.setxattr, fresh("capable"), "security.capability", header)
header = struct.pack("<IIIIII", 0x03000001, 0xff, 0, 0, 0, 0)
said["capability of root"] = attempted(os.setxattr, fresh("capable-3"), "security.capability", header)
print(json.dumps(said))
"""


@ALL
async def test_no_set_id_program_and_no_file_of_root_comes_to_lie_on_the_host(target: Target, place: Path) -> None:
    volume = volume_of(place)
    async with target.sandbox(volumes={str(volume): "/v"}) as sandbox:
        said = await inside(sandbox, 'PLACE = "/v"' + BITS)
        assert "chmod 4755" in said
        for mode in (0o4755, 0o2755, 0o6755):
            try:
                await sandbox.write_file(f"/v/agent-{mode:o}", "x", mode=mode)
            except PermissionError:
                assert target.name == "process"
    made = {path.name for path in volume.iterdir()}
    assert {"chmod-4755", "fchmod-2755", "cp-6755", "target-4755", "tar-4755"} <= made, said
    assert special(volume) == []


@MAPPED
async def test_files_belong_to_the_owner_of_the_volume_and_other_users_of_a_sandbox_to_nobody(
    target: Target, place: Path
) -> None:
    volume = volume_of(place)
    (volume / "of-root").write_text("x")
    (volume / "of-root").chmod(0o600)
    (volume / "of-owner").write_text("x")
    (volume / "of-owner").chmod(0o600)
    os.chown(volume / "of-owner", OWNER, GROUP)
    async with target.sandbox(volumes={str(volume): "/v"}) as sandbox:
        result = await sandbox.exec(
            "cat /v/of-owner && touch /v/root && mkdir /v/d && chmod 777 /v/d && cp /v/root /v/given"
            " && chown 7:8 /v/given && stat -c %u:%g /v /v/root /v/given"
        )
        assert result.stdout == "x0:0\n0:0\n7:8\n", result
        assert not (await sandbox.exec("cat /v/of-root")).success
        assert not (await sandbox.exec("chmod 666 /v/of-root")).success
        assert (await sandbox.exec("touch /v/d/own", user="1000")).success
    ids = {name: ((volume / name).stat().st_uid, (volume / name).stat().st_gid) for name in ("root", "given", "d/own")}
    assert ids["root"] == (OWNER, GROUP)
    assert ids["given"] == (VOLUME_IDS + 7, VOLUME_IDS + 8)
    assert ids["d/own"][0] == VOLUME_IDS + 1000
    async with target.sandbox(volumes={str(volume): "/v"}) as sandbox:
        assert (await sandbox.exec("stat -c %u:%g /v/given")).stdout == "7:8\n", "they are the same in the next sandbox"


@MAPPED
async def test_a_volume_that_an_inner_user_owns_can_be_one_itself(target: Target, place: Path) -> None:
    volume = volume_of(place, VOLUME_IDS + 1000, VOLUME_IDS + 1)
    async with target.sandbox(volumes={str(volume): "/v"}) as sandbox:
        result = await sandbox.exec("touch /v/a /v/b /v/c && chown 999:1001 /v/b && chown 1001:2 /v/c && ls -n /v")
        assert result.success, result
    found = {path.name: (path.stat().st_uid - VOLUME_IDS, path.stat().st_gid - VOLUME_IDS) for path in volume.iterdir()}
    assert found == {"a": (1000, 1), "b": (999, 1001), "c": (1001, 2)}


@MAPPED
async def test_a_writable_volume_of_roots_is_refused_and_a_read_only_one_is_not(target: Target, place: Path) -> None:
    volume = volume_of(place, OWNER, 0)
    for owner in (OWNER, 0):
        os.chown(volume, owner, 0)
        with pytest.raises(SpecError, match=r"(?s)belongs to root.*chown.*read-only"):
            async with target.sandbox(volumes={str(volume): "/v"}):
                pass
    (volume / "x").write_text("seen")
    async with target.sandbox(volumes={str(volume): "/v:ro"}) as sandbox:
        assert (await sandbox.exec("cat /v/x")).stdout == "seen"


@SUPERVISED
async def test_a_volume_that_becomes_roots_after_it_was_looked_at_is_refused(
    target: Target, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher looks at what it has opened."""
    volume = volume_of(place, 0, 0)
    monkeypatch.setattr(construction, "check_volumes", lambda spec: None)
    with pytest.raises(SandboxError, match=r"volume .*Operation not permitted"):
        async with target.sandbox(volumes={str(volume): "/v"}):
            pass


OWN = r"""
def mode(path):
    return oct(os.stat(path).st_mode & 0o7777)
os.umask(0)
os.makedirs("/opt/own/d")
os.chdir("/opt/own")
open("a", "w").close()
os.chmod("a", 0o4755)
os.chmod("d", 0o2775)
fd = os.open("b", os.O_CREAT | os.O_RDWR, 0o6711)
with open("w", "w") as file:
    file.write("content")
os.write(os.open("w", os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o4777), b" more")
subprocess.run(["cp", "-p", "b", "c"], check=True)
subprocess.run(["tar", "cpf", "t.tar", "a", "b", "d"], check=True)
subprocess.run(["tar", "xpf", "t.tar", "-C", "d"], check=True)
errors = []
tries = [(os.chmod, ("/opt/nothing", 0o4755)), (os.chmod, ("a/b", 0o4755)), (os.fchmod, (99, 0o4755)),
         (os.open, ("b", os.O_CREAT | os.O_EXCL, 0o4755)), (os.open, ("w", os.O_CREAT | os.O_PATH, 0o4777)),
         (os.chmod, ("/usr/bin/cat", 0o4755))]
for function, arguments in tries:
    try:
        function(*arguments)
        errors.append("ok")
    except OSError as error:
        errors.append(errno.errorcode[error.errno])
os.chown("a", 1, 1)
os.chmod("a", 0o4755)
count = len(errors)
if os.fork() == 0:
    os.setgid(1000)
    os.setuid(1000)
    for path in ("/opt/own/a", "b"):
        try:
            os.chmod(path, 0o4777)
            errors.append("chmod of another's file")
        except PermissionError:
            pass
    os._exit(len(errors) - count)
if os.wait()[1]:
    errors.append("another's file was changed")
modes = [mode(name) for name in ("a", "b", "c", "d", "d/a", "d/b", "d/d")]
say({"modes": modes, "content": open("w").read() + mode("w"), "inherited": os.get_inheritable(fd), "errors": errors})
"""


@SUPERVISED
async def test_set_id_bits_work_on_the_own_files_of_a_sandbox_with_a_volume(target: Target, place: Path) -> None:
    volume = volume_of(place)
    async with target.sandbox(volumes={str(volume): "/v"}) as sandbox:
        said = await inside(sandbox, OWN)
    assert said == {
        "modes": ["0o4755", "0o6711", "0o6711", "0o2775", "0o4755", "0o6711", "0o2775"],
        "content": "content more0o666",
        "inherited": False,
        "errors": ["ENOENT", "ENOTDIR", "EBADF", "EEXIST", "EINVAL", "EROFS"],
    }


def set_id_package(folder: Path) -> Path:
    """A Debian package with a set-uid and a set-gid program."""
    tree = folder / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <nobody@example.org>\nDescription: tiny\n"
    )
    (tree / "opt" / "tiny").mkdir(parents=True)
    for name, mode in (("set-uid", 0o4755), ("set-gid", 0o2755)):
        (tree / "opt" / "tiny" / name).write_text("#!/bin/sh\n")
        (tree / "opt" / "tiny" / name).chmod(mode)
    package = folder / "tiny_1_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", tree, package], check=True, capture_output=True)
    return package


@MAPPED
async def test_a_package_with_a_set_uid_program_is_installed_beside_a_volume(target: Target, place: Path) -> None:
    volume = volume_of(place)
    package = set_id_package(place)
    package.chmod(0o644)
    volumes = {str(volume): "/v", str(place): "/packages:ro"}
    async with target.sandbox(volumes=volumes) as sandbox:
        result = await sandbox.exec(
            "mkdir -p /var/lib/dpkg/updates /var/lib/dpkg/info && touch /var/lib/dpkg/status /var/lib/dpkg/available"
            " && dpkg -i /packages/tiny_1_all.deb 2>&1 && stat -c %a /opt/tiny/set-uid /opt/tiny/set-gid",
            timeout=60,
        )
        assert result.stdout.endswith("\n4755\n2755\n"), result
        apt = "apt-get -o Dir::State::status=/var/lib/dpkg/status -o Debug::NoLocking=1 install -y --reinstall"
        more = await sandbox.exec(f"mkdir -p /var/lib/apt/lists/partial /var/cache/apt/archives/partial /etc/apt"
                                  f" && {apt} /packages/tiny_1_all.deb 2>&1", timeout=60)  # fmt: skip
        assert more.success, more
        assert (await sandbox.exec("stat -c %a /opt/tiny/set-uid")).stdout == "4755\n"
    assert special(volume) == []
