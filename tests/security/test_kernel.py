"""Group A: namespaces, system calls, capabilities and handles, beyond what the probe asks one call at a time."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from security.conftest import EVERY, NAMESPACES, Target, in_the_open, inside
from security.weak import Weak

pytestmark = pytest.mark.timeout(90)

REFUSED = {"EPERM", "EACCES", "ENOSYS"}

MOUNTS = """
def table():
    return open("/proc/self/mountinfo").read()
before = table()
os.makedirs("/tmp/m", exist_ok=True)
kinds = [("tmpfs", ""), ("proc", ""), ("sysfs", ""), ("bpf", ""), ("debugfs", ""), ("tracefs", ""), ("overlay", ""),
         ("mqueue", ""), ("devpts", ""), ("securityfs", ""), ("cgroup2", "")]
kinds += [("cgroup", name) for name in ("memory", "pids", "cpu", "devices", "freezer")]
said = {}
for kind, options in kinds:
    said[f"{kind} {options}"] = call(165, b"x", b"/tmp/m", kind.encode(), 0, options.encode())[1] or "PWNED"
said["bind"] = call(165, b"/", b"/tmp/m", None, 4096, None)[1] or "PWNED"
said["remount"] = call(165, None, b"/", None, 32, None)[1] or "PWNED"
said["unmount of a mask"] = call(166, b"/proc/keys", 2)[1] or "PWNED"
say({"said": said, "changed": table() != before})
"""


@NAMESPACES
async def test_a03_a05_nothing_can_be_mounted_or_unmounted(target: Target) -> None:
    async with target.sandbox() as sandbox:
        for user in ("0", "1000"):
            found = await inside(sandbox, MOUNTS, user)
            assert set(found["said"].values()) <= REFUSED, found
            assert not found["changed"]


def test_a03_a05_control(weak: Weak) -> None:
    found = in_the_open(weak, MOUNTS)
    assert found["changed"]
    assert "PWNED" in {found["said"][f"cgroup {name}"] for name in ("memory", "pids", "cpu", "freezer")} | {
        found["said"]["cgroup2 "]
    }


JOIN = """
def names(pid):
    found = {}
    for name in ("mnt", "pid", "ipc", "uts", "net", "cgroup", "user"):
        try:
            found[name] = os.stat(f"/proc/{pid}/ns/{name}").st_ino
        except OSError as error:
            found[name] = errno.errorcode[error.errno]
    return found
seen, said = {}, set()
for pid in filter(str.isdigit, os.listdir("/proc")):
    seen[pid] = names(pid)
    for name in seen[pid]:
        try:
            fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        except OSError as error:
            said.add(errno.errorcode[error.errno])
            continue
        child = os.fork()
        if child == 0:
            os._exit(0 if call(308, fd, 0)[0] == 0 else ctypes.get_errno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.add("PWNED" if code == 0 else errno.errorcode[code])
        os.close(fd)
say({"seen": seen, "said": sorted(said)})
"""


def host_namespaces() -> set[int]:
    return {os.stat(f"/proc/self/ns/{name}").st_ino for name in ("mnt", "pid", "ipc", "uts", "net", "cgroup", "user")}


@NAMESPACES
async def test_a04_no_namespace_of_the_host_is_seen_or_joined(target: Target) -> None:
    async with target.sandbox() as sandbox:
        for user in ("0", "1000"):
            found = await inside(sandbox, JOIN, user)
            assert set(found["said"]) <= {*REFUSED, "ENOENT"}
            numbers = {number for seen in found["seen"].values() for number in seen.values()}
            assert numbers & host_namespaces() == set()


def test_a04_control(weak: Weak) -> None:
    found = in_the_open(weak, JOIN)
    assert "PWNED" in found["said"]
    assert {number for seen in found["seen"].values() for number in seen.values()} & host_namespaces()


PROGRAMS = """
done = []
threads = [threading.Thread(target=done.append, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
import multiprocessing, sqlite3, asyncio, tempfile
with multiprocessing.get_context("fork").Pool(2) as pool:
    squares = pool.map(abs, [-1, -2, -3])
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
ping.settimeout(5)
ping.sendto(struct.pack("!BBHHH", 8, 0, 0xf7fe, 0, 1), ("127.0.0.1", 0))
web = socket.create_server(("127.0.0.1", 80))
say([len(done), squares, ping.recv(64)[0], subprocess.check_output(["echo", "hi"], text=True), web.getsockname()[1]])
"""


@NAMESPACES
@pytest.mark.parametrize("user", ["0", "1000"])
async def test_a02_a16_ordinary_programs_work_behind_the_walls(target: Target, user: str) -> None:
    """Threads and forks without clone3, ping without raw sockets, port 80 without a capability."""
    async with target.sandbox() as sandbox:
        assert await inside(sandbox, PROGRAMS, user) == [8, [1, 2, 3], 0, "hi\n", 80]


CREDENTIALS = """
fields = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
say({name: fields[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")}
    | {"uid_map": open("/proc/self/uid_map").read().split(), "gid_map": open("/proc/self/gid_map").read().split()})
"""
EIGHT = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 10))
"""CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID NET_BIND_SERVICE"""


@NAMESPACES
async def test_a20_root_inside_is_nobody_outside_and_unlike_its_neighbour(target: Target) -> None:
    async with target.sandbox() as first, target.sandbox() as second:
        found = [await inside(sandbox, CREDENTIALS) for sandbox in (first, second)]
        for seen in found:
            assert int(seen["CapBnd"], 16) & ~EIGHT == int(seen["CapInh"], 16) == int(seen["CapAmb"], 16) == 0
            assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")
            assert seen["uid_map"] == seen["gid_map"]
        ranges = [range(int(seen["uid_map"][1]), int(seen["uid_map"][1]) + int(seen["uid_map"][2])) for seen in found]
        assert min(ranges[0].start, ranges[1].start) >= 100_000
        assert ranges[0].stop <= ranges[1].start or ranges[1].stop <= ranges[0].start
        ordinary = await inside(first, CREDENTIALS, "1000")
        assert int(ordinary["CapEff"], 16) == int(ordinary["CapPrm"], 16) == 0


def test_a20_control(weak: Weak) -> None:
    found = in_the_open(weak, CREDENTIALS)
    assert int(found["CapBnd"], 16) & ~EIGHT
    assert found["uid_map"][:2] == ["0", "0"]


SET_UID = "cp /usr/bin/id /tmp/suid && chmod 4755 /tmp/suid && ls -l /tmp/suid | cut -c4"


@NAMESPACES
async def test_a21_a_set_uid_program_gives_nothing(target: Target) -> None:
    async with target.sandbox() as sandbox:
        assert (await sandbox.exec(SET_UID)).stdout == "s\n"
        assert (await sandbox.exec("/tmp/suid -u", user="1000")).stdout == "1000\n"
        data = "01000002" + "80000000" + "00" * 12  # version 2: CAP_SETUID
        capability = f"say(attempt(os.setxattr, '/tmp/suid', 'security.capability', bytes.fromhex('{data}')))"
        assert await inside(sandbox, capability) in {"EPERM", "EOPNOTSUPP"}


def test_a21_control(weak: Weak) -> None:
    said = weak.run(["sh", "-c", f"{SET_UID}; setpriv --reuid 1000 --clear-groups /tmp/suid -u"])
    assert said.text == "s\n0\n"


DIRTY_PIPE = """
file = os.open("/usr/bin/true", os.O_RDONLY)
reading, writing = os.pipe()
size = 65536
os.write(writing, bytes(size))
os.read(reading, size)
moved = os.splice(file, writing, 1, offset_src=0)
written = os.write(writing, b"HACKED")
say([moved, written, os.pread(file, 4, 0).hex()])
"""


@NAMESPACES
async def test_a25_a_read_only_file_of_the_host_cannot_be_changed_through_a_pipe(target: Target) -> None:
    shared = Path("/usr/bin/true")
    before = hashlib.sha256(shared.read_bytes()).hexdigest()
    async with target.sandbox() as sandbox:
        # All steps of the attack work; what counts is that the file's pages are not those of the pipe.
        assert await inside(sandbox, DIRTY_PIPE, "1000") == [1, 6, "7f454c46"]
        direct = "say([attempt(os.open, '/usr/bin/true', os.O_WRONLY), attempt(os.unlink, '/usr/bin/true')])"
        assert set(await inside(sandbox, direct)) <= {"EROFS", "EACCES", "EPERM"}
    assert hashlib.sha256(shared.read_bytes()).hexdigest() == before


ABOVE = """
here = os.stat("/")
for _ in range(40):
    os.chdir("..")
said = []
for path in (".", "/..", "/proc/self/root", "/proc/self/cwd", "/proc/self/root/.."):
    there = os.stat(path)
    said.append((there.st_dev, there.st_ino) == (here.st_dev, here.st_ino))
said.append(attempt(os.chroot, "/tmp"))
fd = os.open("/", os.O_RDONLY)
said.append(attempt(lambda: (os.fchdir(fd), os.chdir("../../.."), os.stat("rootfs"))))
said.append(sorted(os.listdir("/..")) == sorted(os.listdir("/")))
say(said)
"""


@NAMESPACES
async def test_a28_there_is_nothing_above_the_root(target: Target) -> None:
    async with target.sandbox() as sandbox:
        for user in ("0", "1000"):
            assert await inside(sandbox, ABOVE, user) == [*[True] * 5, "EPERM", "ENOENT", True]


HANDLES = """
odd = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    links = [f"/proc/{pid}/{name}" for name in ("cwd", "root", "exe")]
    for folder in ("fd", "map_files"):
        try:
            links += [f"/proc/{pid}/{folder}/{name}" for name in os.listdir(f"/proc/{pid}/{folder}")]
        except OSError:
            pass
    for link in links:
        try:
            target, there = os.readlink(link), os.stat(link)
        except OSError:
            continue
        if target.split(":")[0] in ("pipe", "socket", "anon_inode") or target.startswith("/proc/"):
            continue
        try:
            same = os.stat(target.removesuffix(" (deleted)"))
            reachable = (same.st_dev, same.st_ino) == (there.st_dev, there.st_ino)
        except OSError:
            reachable = False
        if not reachable:
            odd.append(f"{link} -> {target}")
say(odd)
"""


@NAMESPACES
async def test_a29_no_handle_leads_outside(target: Target) -> None:
    async with target.sandbox() as sandbox:
        for user in ("0", "1000"):
            assert await inside(sandbox, HANDLES, user) == []


def test_a29_control(weak: Weak, host_secret: Path) -> None:
    assert any(str(host_secret) in handle for handle in in_the_open(weak, HANDLES))


@EVERY
async def test_a30_signals_and_priorities_stay_inside(target: Target) -> None:
    bystander = subprocess.Popen(["sleep", "300"])  # noqa: ASYNC220
    try:
        async with target.sandbox() as sandbox, target.peer() as peer:
            decoy = await sandbox.start(["sleep", "300"])
            neighbour = await peer.start(["sleep", "300"])
            await sandbox.exec("kill -9 -1", timeout=20)
            ended = await asyncio.wait_for(decoy.wait(), 20)
            assert ended.exit_code == 128 + signal.SIGKILL, "the attack itself did not work"
            assert (await sandbox.exec("echo alive", timeout=20)).stdout == "alive\n"
            assert await peer.commands() == [neighbour.id]
            if not target.is_virtual:
                said = await inside(sandbox, "say([call(302, 1, 7, 0, 0)[1], call(141, 0, 0, -20)[1]])")
                assert said[1] in REFUSED
        assert bystander.poll() is None
        assert os.getpriority(os.PRIO_PROCESS, bystander.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        bystander.kill()
        bystander.wait()
