"""Group B: hostile images, hostile arguments, leaked handles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import EngineError, ImageError, SandboxError, SpecError
from atoll.images import Image, ImageConfig, Kind
from atoll.model import SandboxSpec, Volume
from atoll.sandbox.sandbox import AsyncSandbox
from needs import need, not_applicable
from security.conftest import EVERY, IDS, NAMESPACES, OCI, PRELUDE, PYTHON, RUNC, WITH_GVISOR, Target, inside
from security.weak import Weak
from unit.images import archives

pytestmark = pytest.mark.timeout(90)


LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
USR = {"/usr": "/usr:ro"}
"""Programs for an image of a few bytes."""


@pytest.fixture
def place(folder: Path) -> Iterator[Path]:
    """A directory of the host for one test."""
    path = folder / f"p{os.urandom(3).hex()}"
    path.mkdir(mode=0o755)
    yield path
    shutil.rmtree(path)


def small_image(place: Path) -> Path:
    root = place / "image" / "rootfs"
    for name in ("etc", "usr", "tmp", "dev", "proc", "sys"):
        (root / name).mkdir(parents=True)
    for name, link in LINKS.items():
        (root / name).symlink_to(link)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


def put_in_place_of_any_image(target: Target, root: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    """The store refuses hostile images when they come in. Here one got past it."""
    image = Image("evil", Kind.TAR, root=root, **config)

    async def acquire(reference: str, sandbox_id: str) -> Image:
        return image

    monkeypatch.setattr(target.linux.layout.images, "acquire", acquire)


def names_and_times(root: Path) -> list[tuple[str, int, int, int]]:
    """Without following a link, which here may lead anywhere."""
    found = []
    for path, folders, files in os.walk(root):
        for name in (".", *folders, *files):
            info = os.lstat(f"{path}/{name}")
            found.append((f"{path}/{name}", info.st_mode, info.st_uid, info.st_mtime_ns))
    return sorted(found)


# --- B01, B07: the image's own /dev, /proc, /sys ----------------------------------------------------------------------


def _replace_by_link(name: str) -> Callable[[Path, Path], None]:
    def spoil(root: Path, victim: Path) -> None:
        (root / name).rmdir()
        (root / name).symlink_to(victim)

    return spoil


def _link_below(name: str, link: str) -> Callable[[Path, Path], None]:
    def spoil(root: Path, victim: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(link.replace("VICTIM", str(victim)))

    return spoil


SPOILED = {
    "dev": _replace_by_link("dev"),
    "proc": _replace_by_link("proc"),
    "sys": _replace_by_link("sys"),
    "usr": _replace_by_link("usr"),
    "tmp": _replace_by_link("tmp"),
    "shared memory": _link_below("dev/shm", "VICTIM"),
    "terminals": _link_below("dev/pts", "VICTIM"),
    "null": _link_below("dev/null", "/proc/sysrq-trigger"),
    "work directory": _link_below("workspace", "/../../../../../..VICTIM"),
    "work directory by proc": _link_below("workspace", "/proc/1/rootVICTIM"),
    "home": _link_below("root", "VICTIM"),
}


@NAMESPACES
@pytest.mark.parametrize("case", SPOILED)
async def test_b01_an_image_that_points_outside_reaches_nothing(
    target: Target, case: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, root = place / "victim", small_image(place)
    victim.mkdir(mode=0o777)
    SPOILED[case](root, victim)
    before = names_and_times(root)
    put_in_place_of_any_image(target, root, monkeypatch)
    try:
        async with target.sandbox(image="tar:/evil", volumes=USR) as sandbox:
            await sandbox.exec("touch /dev/shm/x /tmp/x /root/x /workspace/x; ls /dev /proc/1 /sys", timeout=10)
            await sandbox.write_file("/workspace/y", "y")
    except (SandboxError, OSError):
        pass  # refused: as good
    assert os.listdir(victim) == []
    assert names_and_times(root) == before, "the shared image was changed"


def test_b01_control(weak: Weak, place: Path) -> None:
    victim, root = place / "victim", small_image(place)
    victim.mkdir()
    SPOILED["dev"](root, victim)
    weak.run(["/bin/true"], root=root, devices=False)
    if not os.listdir(victim):
        not_applicable("this crun resolves an image's /dev inside the image")


@RUNC
async def test_b01_the_store_takes_no_such_image(target: Target, place: Path) -> None:
    victim = place / "victim"
    victim.mkdir()
    for name in ("dev", "proc", "sys"):
        path = place / f"{name}.tar"
        path.write_bytes(archives.small_root(archives.symlink(name, str(victim))))
        with contextlib.suppress(SandboxError):
            async with target.sandbox(image=f"tar:{path}"):
                pass
    assert os.listdir(victim) == []


@NAMESPACES
async def test_b07_masks_and_terminals_are_not_made_from_the_images_files(
    target: Target, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small_image(place)
    (root / "dev/null").symlink_to("/proc/sysrq-trigger")
    (root / "dev/pts").mkdir()
    (root / "dev/pts/0").symlink_to("/proc/sys/kernel/core_pattern")
    (root / "dev/console").symlink_to("/proc/sys/kernel/core_pattern")
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    put_in_place_of_any_image(target, root, monkeypatch)
    async with target.sandbox(image="tar:/evil", volumes=USR) as sandbox:
        terminal = await sandbox.open_terminal(["cat", "/proc/keys", "/proc/timer_list", "/proc/interrupts"])
        shown = b"".join([piece async for piece in terminal])
        assert shown == b"", "a mask shows something"
        wrote = "say([attempt(os.open, path, 1) for path in ('/proc/sys/kernel/core_pattern', '/dev/pts/0')])"
        assert set(await inside(sandbox, wrote)) <= {"EACCES", "EROFS", "ENOENT", "EIO"}
        assert not await sandbox.exists("/dev/console")
        assert (await sandbox.stat("/dev/null")).kind == "char_device"
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern


# --- B03: the runtime's program ---------------------------------------------------------------------------------------

OVERWRITE = """
seen, said, end = set(), set(), time.time() + SECONDS
while time.time() < end and not os.path.exists("/tmp/enough"):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        seen.add(pid)
        try:
            os.open(f"/proc/{pid}/exe", os.O_WRONLY)
            said.add(f"PWNED {os.readlink(f'/proc/{pid}/exe')}")
        except OSError as error:
            said.add(errno.errorcode[error.errno])
say([len(seen), sorted(said)])
"""


@NAMESPACES
@pytest.mark.parametrize(
    "runs", [pytest.param(10, id="10"), pytest.param(200, id="200", marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_b03_no_program_that_enters_can_be_overwritten(target: Target, runs: int) -> None:
    """The digests of all runtimes are compared around this module."""
    async with target.sandbox() as sandbox:
        attack = asyncio.create_task(inside(sandbox, OVERWRITE.replace("SECONDS", "200"), timeout=220))
        for _ in range(runs):
            assert (await sandbox.exec("sleep 0.05", timeout=60)).success
        await sandbox.write_file("/tmp/enough", "")
        seen, said = await attack
        assert seen >= runs // 2, "the attack saw nobody enter"
        assert set(said) <= {"EACCES", "EPERM", "ETXTBSY", "EROFS", "ENOENT", "ESRCH"}


@NAMESPACES
async def test_b03_an_image_whose_programs_are_the_runtime_itself(
    target: Target, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small_image(place)
    (root / "bin").unlink()
    (root / "bin").mkdir()
    for name in ("sh", "bash", "true"):
        (root / "bin" / name).write_text("#!/proc/self/exe\n")
        (root / "bin" / name).chmod(0o755)
    put_in_place_of_any_image(target, root, monkeypatch)
    async with target.sandbox(image="tar:/evil") as sandbox:
        for command in ("true", ["/bin/true"], ["/proc/self/exe"], ["/proc/1/exe"]):
            with contextlib.suppress(OSError):
                assert not (await sandbox.exec(command, timeout=10)).success
        await sandbox.write_file("/tmp/alive", "yes")


# --- B04: descriptors -------------------------------------------------------------------------------------------------

DESCRIPTORS = """
found = {}
for name in os.listdir("/proc/self/fd"):
    try:
        found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        pass
say({number: target for number, target in found.items() if number > 2 and not target.endswith("/fd")})
"""


@WITH_GVISOR
async def test_b04_descriptors_of_the_maker_do_not_get_in(target: Target, host_secret: Path) -> None:
    leaks = [os.open(path, os.O_RDONLY) for path in (host_secret, host_secret.parent) for _ in range(10)]
    try:
        for leak in leaks:
            os.set_inheritable(leak, True)
        async with target.sandbox() as sandbox:
            assert await inside(sandbox, DESCRIPTORS) == {}
            terminal = await sandbox.open_terminal(["ls", "/proc/self/fd"])
            shown = b"".join([piece async for piece in terminal]).split()
            assert set(shown) <= {b"0", b"1", b"2", b"3"}, "3 is the directory that ls reads"
            if target.name != "process":
                assert held_by(target.linux.layout.group(sandbox.id).pids(), host_secret.parent) == []
    finally:
        for leak in leaks:
            os.close(leak)


def held_by(pids: set[int], folder: Path) -> list[str]:
    """Descriptors of these processes that lead into the directory, as the host sees them."""
    assert pids
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found += [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    return [path for path in found if path.startswith(str(folder))]


def test_b04_control(weak: Weak, host_secret: Path) -> None:
    said = weak.run(PYTHON, stdin=b"import os; print(os.readlink('/proc/self/fd/3'))")
    assert said.text.strip() == str(host_secret)


@IDS
async def test_b04_what_a_runtime_is_started_with_stays_the_hosts(target: Target) -> None:
    """A runtime gives its standard streams to the sandbox's root. They must be no files that the host goes on using."""
    nodes = [os.stat(f"/dev/{name}") for name in ("null", "zero", "full", "tty", "ptmx")]
    async with target.sandbox() as sandbox:
        (first,) = [first for first, owner in target.linux.layout.ids.owners().items() if owner == sandbox.id]
        owners = {os.stat(f"/dev/{name}").st_uid for name in ("null", "zero", "full", "tty", "ptmx")}
        assert owners & set(range(first, first + 65536)) == set()
        if not target.is_virtual:  # gVisor's own processes, outside of the sandbox, may hold what they like
            for pid in target.linux.layout.group(sandbox.id).pids():
                streams = [os.stat(f"/proc/{pid}/fd/{number}") for number in range(3)]
                assert not any(os.path.samestat(stream, node) for stream in streams for node in nodes)


# --- B05, B06: working directories ------------------------------------------------------------------------------------

DIRECTORIES = {
    "empty": "",
    "parent": "..",
    "above the root": "/../../..",
    "root of the first process": "/proc/1/root",
    "parent of its own": "/proc/self/cwd/..",
    "link to a descriptor": "/tmp/link",
    "long": "/" + "x" * 5000,
    "NUL": "/tmp\0/x",
    "line break": "/tmp\n",
    **{f"descriptor {number}": f"/proc/self/fd/{number}" for number in (3, 4, 5, 6, 7, 8, 12, 20)},
}
WHERE = """
root, top = os.stat("/"), os.open(".", os.O_RDONLY)
for _ in range(50):
    top = os.open("..", os.O_RDONLY, dir_fd=top)
above = os.fstat(top)
say([os.getcwd(), os.readlink("/proc/self/cwd"), (above.st_dev, above.st_ino) == (root.st_dev, root.st_ino)])
"""


@WITH_GVISOR
async def test_b05_b06_a_command_never_stands_outside(target: Target) -> None:
    async with target.sandbox() as sandbox:
        await sandbox.exec("ln -s /proc/self/fd/7 /tmp/link")
        for name, path in DIRECTORIES.items():
            try:
                result = await sandbox.exec(PYTHON, stdin=PRELUDE + WHERE, cwd=path, timeout=20)
            except (OSError, ValueError, SandboxError):
                continue
            if result.success:
                here, link, below_root = json.loads(result.stdout)
                assert here.startswith("/"), name
                assert "unreachable" not in link, name
                assert below_root, name


@pytest.mark.parametrize("path", ["/proc/self/fd/7", "/proc/1/root", "/dev/fd/3", "/sys", "/", "x", "/a/../..", "/\0"])
def test_b05_no_sandbox_works_in_the_kernels_directories(path: str) -> None:
    with pytest.raises(SpecError):
        SandboxSpec.of(work_dir=path)


# --- B08: the environment ---------------------------------------------------------------------------------------------


@pytest.fixture
def trap(place: Path) -> dict[str, str]:
    """Variables that make a program of the host that sees them leave a mark."""
    mark, bin_folder = place / "mark", place / "bin"
    source = place / "evil.c"
    source.write_text(
        "#include <fcntl.h>\n__attribute__((constructor)) static void evil(void) "
        f'{{ open("{mark}", O_CREAT | O_WRONLY, 0666); }}\n'
    )
    need("gcc")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", place / "evil.so", source], check=True, timeout=60)
    bin_folder.mkdir()
    for name in ("runc", "crun", "runsc", "bwrap", "sh", "bash", "mount", "umount", "btrfs", "mkfs.btrfs", "losetup"):
        (bin_folder / name).write_text(f"#!/bin/sh\n: > {mark}\nexit 1\n")
        (bin_folder / name).chmod(0o755)
    (place / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (place / "rc").write_text(f": > {mark}\n")
    return {
        "LD_PRELOAD": str(place / "evil.so"),
        "LD_AUDIT": str(place / "evil.so"),
        "LD_LIBRARY_PATH": str(place),
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "BASH_ENV": str(place / "rc"),
        "ENV": str(place / "rc"),
        "PYTHONPATH": str(place),
        "PYTHONSTARTUP": str(place / "sitecustomize.py"),
        "GCONV_PATH": str(place),
        "_LIBCONTAINER_INITPIPE": "3",
        "LISTEN_FDS": "50",
        "NOTIFY_SOCKET": str(place / "notify"),
        "XDG_RUNTIME_DIR": str(place),
    }


@EVERY
async def test_b08_variables_reach_no_program_of_the_host(target: Target, trap: dict[str, str], place: Path) -> None:
    async with target.sandbox(env=trap) as sandbox:
        result = await sandbox.exec("echo $BASH_ENV $NOTIFY_SOCKET", env=trap, timeout=20)
        assert str(place / "notify") in result.stdout, "they do appear inside"
        if target.name != "process":
            await target.linux.pause(sandbox.access.handle())
            await target.linux.resume(sandbox.access.handle())
    assert not (place / "mark").exists()


@RUNC
async def test_b08_variables_of_an_image_reach_no_program_of_the_host(
    target: Target, trap: dict[str, str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place_of_any_image(target, small_image(place), monkeypatch, config=ImageConfig(env=trap))
    async with target.sandbox(image="tar:/evil", volumes=USR) as sandbox:
        assert str(place) in (await sandbox.exec("echo $NOTIFY_SOCKET", timeout=20)).stdout
    assert not (place / "mark").exists()


def test_b08_control(trap: dict[str, str], place: Path) -> None:
    subprocess.run(["/bin/bash", "-c", "true"], env=trap, capture_output=True, timeout=20)
    assert (place / "mark").exists()


@pytest.mark.parametrize("name", ["A=B", "", "A\0B", "A\nB", "A B"])
def test_b08_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(SpecError):
        SandboxSpec.of(env={name: "x"})


@pytest.mark.parametrize("value", ["a\0b", "x" * (1 << 20)])
def test_b08_a_value_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(SpecError):
        SandboxSpec.of(env={"A": value})


@RUNC
async def test_b08_the_same_for_one_command(target: Target) -> None:
    async with target.sandbox() as sandbox:
        for env in ({"A=B": "x"}, {"": "x"}, {"A\0B": "x"}, {"A": "a\0b"}):
            with pytest.raises((ValueError, OSError, SandboxError)):
                await sandbox.exec("true", env=env)
        assert (await sandbox.exec("true")).success


# --- B10: users -------------------------------------------------------------------------------------------------------

PASSWD = {
    "pipe": "rm /etc/passwd; mkfifo /etc/passwd",
    "link to the environment": "ln -sf /proc/self/environ /etc/passwd",
    "link to an endless device": "ln -sf /dev/zero /etc/passwd",
    "link to itself": "ln -sf passwd /etc/passwd",
    "sparse": "rm /etc/passwd; truncate -s 2G /etc/passwd",
    "many lines": "python3 -c \"open('/etc/passwd','w').write('x:x:1:1::/:/x\\n' * 1000000)\"",
    "one long line": "head -c 20M /dev/zero | tr '\\0' a > /etc/passwd",
    "ids out of range": "echo 'app:x:4294967296:-1::/:/bin/sh' > /etc/passwd",
    "directory": "rm /etc/passwd; mkdir /etc/passwd",
}


@RUNC
@pytest.mark.parametrize("case", PASSWD)
async def test_b10_a_hostile_list_of_users_harms_nobody(target: Target, case: str) -> None:
    async with target.sandbox(memory="512m") as sandbox:
        await sandbox.exec(PASSWD[case], timeout=30)
        before = resident_bytes()
        with pytest.raises(OSError, match="Invalid argument"):  # there is no such user
            await asyncio.wait_for(sandbox.exec(["/bin/true"], user="app", timeout=5), 10)
        assert resident_bytes() - before < 16 << 20
        assert (await sandbox.exec(["/bin/echo", "alive"], timeout=10)).stdout == "alive\n"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# --- B11, B13, B17: words that are not words --------------------------------------------------------------------------

LABELS = {
    "run.oci.handler": "krun",
    "run.oci.hooks.stdout": "/tmp/x",
    "org.criu.config": "/tmp/x",
    "io.kubernetes.cri.sandbox-id": "x",
    "x": ";touch /srv/p;$(touch /srv/p)",
    "run.oci.systemd.subgroup": "../../..",
}


@OCI
async def test_b11_labels_and_annotations_are_data_only(target: Target) -> None:
    marker = Path("/srv/p")
    async with target.sandbox(labels=LABELS) as sandbox:
        bundle = json.loads((target.linux.layout.run(sandbox.id) / "config.json").read_text())
        assert {"annotations", "hooks"} & bundle.keys() == set()
        assert "sysctl" not in bundle["linux"]
        text = json.dumps(bundle)
        assert [label for label in LABELS if len(label) > 1 and label in text] == []
    assert not marker.exists()


NAMES = [
    "../../x",
    "a/b",
    "-rf",
    ".",
    "..",
    "",
    "a\n",
    "x" * 300,
    "%2e%2e",
    "a,upperdir=/etc",
    "\u202egnp",
    "a:b",
    "a\0",
]


@EVERY
async def test_b13_a_name_is_never_a_path_or_an_option(target: Target, folder: Path) -> None:
    spec = SandboxSpec.of(isolation="gvisor") if target.is_virtual else SandboxSpec()
    for name in NAMES:
        with pytest.raises((SandboxError, ValueError)):
            await target.engine.create(name, spec)
    assert await target.engine.list() == []
    assert not (folder / "x").exists()


@pytest.mark.parametrize(
    "wish",
    [
        {"privileged": True}, {"capabilities": ["ALL"]}, {"caps": ["SYS_ADMIN"]}, {"seccomp": "unconfined"},
        {"pid": "host"}, {"network": "host"}, {"devices": ["/dev/vda"]}, {"userns": "host"}, {"isolation": "none"},
        {"sysctls": {"kernel.core_pattern": "|/x"}}, {"limits": {"oom_score_adj": -1000}}, {"annotations": {"a": "b"}},
        {"hostname": "a b;c"}, {"hostname": "-x"},
    ],
    ids=str,
)  # fmt: skip
def test_b17_privileges_cannot_be_asked_for(wish: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        SandboxSpec.of(**wish)


# --- B12: sockets -----------------------------------------------------------------------------------------------------

SOCKETS = """
found = []
for top in ("/run", "/var", "/tmp", "/dev", "/root", "/home", "/workspace", "/etc", "/srv", "/mnt", "/opt"):
    for folder, _, names in os.walk(top):
        found += [f"{folder}/{name}" for name in names if stat.S_ISSOCK(os.lstat(f"{folder}/{name}").st_mode)]
names = [line.split()[-1] for line in open("/proc/net/unix").read().splitlines()[1:]]
found += [name for name in names if "@" in name or "/" in name]
said = []
for name in GIVEN:
    with socket.socket(socket.AF_UNIX) as each:
        said.append(attempt(each.connect, name))
say([found, said])
"""


@NAMESPACES
async def test_b12_no_control_socket_can_be_reached(target: Target) -> None:
    beacon_name = f"\0atoll-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as beacon:
        beacon.bind(beacon_name)
        beacon.listen()
        async with target.sandbox() as sandbox:
            agent = str(target.linux.layout.socket(sandbox.id))
            given = [beacon_name, agent, "/run/docker.sock", "/run/containerd/containerd.sock"]
            found, said = await inside(sandbox, SOCKETS.replace("GIVEN", repr(given)))
            assert set(said) <= {"ECONNREFUSED", "ENOENT"}
            assert [name for name in found if str(target.settings.run_dir) in name or "docker" in name] == []


def test_b12_control(weak: Weak) -> None:
    said = weak.run(PYTHON, stdin=b"import os, stat; print(stat.S_ISSOCK(os.stat('/run/docker.sock').st_mode))")
    assert said.text == "True\n"


# --- B14, B15: volumes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["../../etc:/x", "/a/../../etc:/x", "relative:/x", "/a:x", "/a:/b/../..", "/a:/x:rw,exec", "/a", ":/x", "/\0:/x"],
)
def test_b14_a_volume_is_named_by_whole_paths(text: str) -> None:
    with pytest.raises((SpecError, ValueError)):
        Volume.parse(text)


@IDS
@pytest.mark.parametrize("path", ["/", "/proc", "/proc/sys", "/sys/fs/cgroup", "/dev", "/dev/shm"])
async def test_b14_a_volume_covers_no_wall(target: Target, path: str, place: Path) -> None:
    with pytest.raises((SpecError, EngineError, ImageError)):
        async with target.sandbox(volumes={str(place): f"{path}:ro"}):
            pass


@NAMESPACES
async def test_b14_a_volume_lands_inside_whatever_the_image_links_to(
    target: Target, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, shared, root = place / "victim", place / "shared", small_image(place)
    victim.mkdir()
    shared.mkdir()
    os.chown(shared, 4321, 4321)
    (shared / "file").write_text("from the host")
    (root / "data").symlink_to(f"../../../../../../..{victim}")
    put_in_place_of_any_image(target, root, monkeypatch)
    with contextlib.suppress(SandboxError):
        async with target.sandbox(image="tar:/evil", volumes={"/usr": "/usr:ro", str(shared): "/data/in"}) as sandbox:
            assert (await sandbox.exec("cat /data/in/file")).stdout == "from the host"
    assert os.listdir(victim) == []


SWAP = """
os.chdir("/vol")
os.makedirs("a/b", exist_ok=True)
os.symlink("TARGET", "l")
count, end = 0, time.time() + 60
while not os.path.exists("/tmp/enough") and time.time() < end:
    LIBC.renameat2(-100, b"a", -100, b"l", 2)
    count += 1
say(count)
"""


@RUNC
async def test_b15_a_directory_inside_a_shared_volume_is_never_a_way_out(target: Target, place: Path) -> None:
    """The first sandbox may write to the volume and swaps a directory of it for a link to the host's files."""
    shared, victim = place / "shared", place / "victim"
    (shared / "a" / "b").mkdir(parents=True)
    (victim / "b").mkdir(parents=True)
    (victim / "b" / "outside").write_text("")
    for path in (shared, shared / "a", shared / "a" / "b", victim / "b"):
        os.chown(path, 4321, 4321)
    async with target.sandbox(volumes={str(shared): "/vol"}) as first:
        attack = asyncio.create_task(inside(first, SWAP.replace("TARGET", str(victim)), timeout=70))
        seen: set[str] = set()
        end = time.monotonic() + 5
        while time.monotonic() < end and "outside" not in "".join(seen):
            with contextlib.suppress(SandboxError):
                async with target.sandbox(volumes={str(shared / "a" / "b"): "/in"}) as second:
                    seen.add((await second.exec("ls /in")).stdout)
        await first.write_file("/tmp/enough", "")
        assert await attack > 100, "nothing was swapped"
    assert "outside\n" not in seen


@RUNC
async def test_b14_a_read_only_volume_is_read_only(target: Target, place: Path) -> None:
    shared = place / "shared"
    shared.mkdir(mode=0o777)
    (shared / "file").write_text("as it was")
    payload = """
say([attempt(lambda: open("/in/file", "w")), attempt(os.unlink, "/in/file"), attempt(os.chmod, "/in/file", 0o777),
     attempt(os.link, "/in/file", "/in/l"), attempt(os.mkdir, "/in/d"), attempt(os.utime, "/in/file"),
     call(165, None, b"/in", None, 32 | 4096, None)[1]])
"""
    async with AsyncSandbox(
        engine=target.engine, settings=target.settings, volumes={str(shared): "/in:ro"}, pids=64
    ) as sandbox:
        assert set(await inside(sandbox, payload)) <= {"EROFS", "EPERM"}
    assert (shared / "file").read_text() == "as it was"
