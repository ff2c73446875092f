"""The launcher under AddressSanitizer and UBSan, on sound and on spoiled plans. See native/testing/rehearsal.c."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from atoll.engines.host.confinement import bpf
from atoll.engines.host.confinement.seccomp import default_profile
from atoll.engines.linux import launcher_protocol
from atoll.engines.linux.launcher_protocol import Joining
from atoll.engines.linux.plan.sandbox_plan import HostFacts, IdRange, Plan, Root, for_rootless, make_plan
from atoll.model import SandboxSpec

SOURCES = Path(__file__).parents[2] / "native"
V1 = Joining(tuple(Path(f"/sys/fs/cgroup/{name}/a/b/tasks") for name in ("cpu", "memory", "pids")), devices=Path("/d"))
V2 = Joining(born_in=Path("/sys/fs/cgroup/a/b"))


def plan(ids: IdRange, **wanted: object) -> Plan:
    spec = SandboxSpec.of(env={"A": "x" * 300}, **wanted)
    root = Root((Path("/images/a"), Path("/images/b")), Path("/layers/c"), "rootfs", Path("/usr"))
    return make_plan(spec, HostFacts(), root, ids, sandbox_id="a", argv=("agent", "--listen-fd", "3"))


def frames(made: Plan, joining: Joining) -> bytes:
    early = launcher_protocol.early_operations(made, joining)
    parts = (
        early.host,
        early.inside,
        *launcher_protocol.sandbox_operations(made, joining),
        bpf.assemble(default_profile(), "x86_64"),
    )
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


@pytest.fixture(scope="module")
def rehearsal() -> Path:
    subprocess.run(["make", "-s", "-C", str(SOURCES), "rehearsal"], check=True)
    return SOURCES / "build" / "rehearsal"


@pytest.fixture
def plans(tmp_path: Path) -> list[Path]:
    volumes = [{"host": "/tmp", "path": "/data"}, {"host": "/etc/hosts", "path": "/x/y", "read_only": True}]
    removing = launcher_protocol.encode(["enter", "4", "remove", "/a/b", "ready"])
    made = {
        "v1": frames(plan(IdRange(0x7000_0000), volumes=volumes), V1),
        "v2": frames(plan(IdRange(0x7000_0000)), V2),
        "range": frames(for_rootless(plan(IdRange(1, first_alone=True), volumes=volumes)), Joining()),
        "single": frames(for_rootless(plan(IdRange(1, 1, inner=1000))), Joining()),
        "removing": b"".join(struct.pack("<I", len(part)) + part for part in (removing, b"\0")),
    }
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    return [tmp_path / name for name in made]


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(1500, marks=pytest.mark.timeout(120)),
        pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_no_plan_makes_it_touch_what_it_should_not(rehearsal: Path, plans: list[Path], rounds: int) -> None:
    seed = 1 if rounds < 10_000 else int.from_bytes(os.urandom(4))
    environment = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        [rehearsal, str(rounds), str(seed), *plans], env=environment, capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_sound_plans_get_as_far_as_the_agent(rehearsal: Path, plans: list[Path]) -> None:
    """Or the other test would show nothing."""
    done = subprocess.run([rehearsal, "0", "0", *plans], capture_output=True, text=True)
    assert done.stdout.split() == ["7", "7", "7", "7", "0"], done.stderr
