"""Group B: hostile working directories, variables, users, names and labels."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from atoll.errors import SandboxError, SpecError
from atoll.images import ImageConfig
from atoll.model import SandboxSpec
from needs import need
from security.conftest import EVERY, OCI, PRELUDE, PYTHON, RUNC, WITH_GVISOR, Target
from security.hostile_images import USR, put_in_place_of_any_image, small_image

pytestmark = pytest.mark.timeout(90)


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


@pytest.mark.parametrize("path", ["/proc/self/fd/7", "/proc/1/root", "/dev/fd/3", "/sys", "x", "/a/../..", "/\0"])
def test_b05_no_sandbox_works_in_the_kernels_directories(path: str) -> None:
    with pytest.raises(SpecError):
        SandboxSpec.of(work_dir=path)


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
