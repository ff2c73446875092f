"""Group B: hostile images, the runtime's program, leaked handles."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.errors import SandboxError
from needs import not_applicable
from security.conftest import IDS, NAMESPACES, PYTHON, RUNC, WITH_GVISOR, Target, inside
from security.hostile_images import USR, put_in_place_of_any_image, small_image
from security.weak import Weak
from unit.images import archives

pytestmark = pytest.mark.timeout(90)


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
