from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.engines.linux import launcher_protocol
from atoll.engines.linux.plan.sandbox_plan import Plan, for_virtual_kernel
from atoll.engines.linux.runtimes import oci_bundle

REPOSITORY = Path(__file__).parents[3]
PlanOf = Callable[..., Plan]


def words(plan: Plan) -> list[str]:
    return launcher_protocol.runtime_operations(plan, Path("/mnt")).decode().split("\0")[:-1]


def test_no_option_of_a_mount_names_a_path_of_the_host(plan_of: PlanOf) -> None:
    listed = words(plan_of(volumes=[{"host": "/srv/secret", "path": "/data"}]))
    options = [word for word in listed if "lowerdir=" in word]
    assert len(options) == 2
    assert not any("/images" in word or "/layers" in word or "/srv" in word for word in options)


def test_layers_are_mapped_and_read_only_and_the_writable_one_is_mapped(plan_of: PlanOf) -> None:
    listed = words(plan_of())
    clones = {listed[at + 1]: listed[at + 3] for at, word in enumerate(listed) if word == "clone"}
    assert clones == {
        "/images/1": "ro,nosuid,nodev,mapped",
        "/layers/a": "nosuid,nodev,mapped",
        "/usr": "ro,nosuid,nodev,mapped",
    }


def test_sources_are_taken_before_the_stage_covers_anything(plan_of: PlanOf) -> None:
    listed = words(plan_of(volumes=[{"host": "/mnt/data", "path": "/data"}]))
    assert max(at for at, word in enumerate(listed) if word == "clone") < listed.index("stage")


def test_the_image_is_only_touched_inside_the_sandbox(plan_of: PlanOf) -> None:
    listed = words(plan_of())
    assert listed.index("inside") < min(
        at for at, word in enumerate(listed) if word in ("put", "move", "mount", "cover", "directory")
    )


def test_a_path_with_a_nul_byte_is_refused(plan_of: PlanOf) -> None:
    plan = for_virtual_kernel(plan_of(), Path("/bin/agent"), "/a\0b")
    with pytest.raises(ValueError, match="NUL"):
        launcher_protocol.runtime_operations(plan, Path("/mnt"))


def test_the_runtime_is_left_with_the_process_the_pid_namespace_and_proc(plan_of: PlanOf) -> None:
    config = oci_bundle.config(plan_of(limits={"pids": 7}), Path("/mnt"), "/atoll/a")
    assert [space["type"] for space in config["linux"]["namespaces"]] == ["pid", "mount", "cgroup", "user"]
    assert config["linux"]["cgroupsPath"] == "/atoll/a"
    assert config["linux"]["resources"]["pids"] == {"limit": 7}
    assert config["process"]["noNewPrivileges"] is True


def test_what_proc_tells_is_covered_once_there_is_one(plan_of: PlanOf) -> None:
    plan = plan_of()
    listed = launcher_protocol.entry_operations(plan).decode().split("\0")
    assert listed[listed.index("base") + 1] == "/rootfs/proc"
    covered = {f"/proc/{listed[at + 1]}" for at, word in enumerate(listed) if word == "cover"}
    assert covered == {path for path in plan.masked_paths if path.startswith("/proc/")}
    for number, shadow in enumerate(plan.shadows):
        at = listed.index(shadow.path.removeprefix("/proc/"))
        assert listed[at - 2 : at] == ["shadow", f"null-{number}"]
        assert listed[at + 1] == shadow.content


def test_the_entry_has_three_capabilities_more_and_is_told_to_give_them_up(plan_of: PlanOf) -> None:
    process = oci_bundle.config(plan_of(), Path("/mnt"), "/atoll/a")["process"]
    assert set(process["capabilities"]["bounding"]) - {f"CAP_{name}" for name in plan_of().capabilities} == {
        "CAP_SETPCAP",
        "CAP_SYS_CHROOT",
        "CAP_SYS_ADMIN",
    }
    assert "inheritable" not in process["capabilities"]
    assert "ambient" not in process["capabilities"]
    assert process["args"][:6] == ["/proc/self/fd/4", "within", "6", "7", "5", "--"]
    words = launcher_protocol.entry_operations(plan_of()).decode().split("\0")
    assert words[-8:] == ["root", "/rootfs", "chroot", "cwd", "/workspace", "execute", str(0xFB), ""]


def test_swap_is_closed(plan_of: PlanOf) -> None:
    config = oci_bundle.config(plan_of(limits={"memory_bytes": "64m"}), Path("/mnt"), "/a")
    assert config["linux"]["resources"]["memory"] == {"limit": 64 << 20, "swap": 64 << 20}


def test_a_failure_names_the_step_and_what_it_was_about() -> None:
    failed = launcher_protocol.failure("failed 20 put /data: x")
    assert failed is not None
    assert (failed.step, failed.detail, str(failed)) == ("put", "/data: x", "put /data: x: Not a directory")
    assert failed.is_of_the_image
    bare = launcher_protocol.failure("failed 1 loopback ")
    assert bare is not None
    assert (str(bare), bare.is_of_the_image) == ("loopback: Operation not permitted", False)


@pytest.mark.parametrize("line", ["", "ok", "failed", "failed x put /data", "killed put", "first 7"])
def test_what_is_no_failure_is_not_taken_for_one(line: str) -> None:
    assert launcher_protocol.failure(line) is None


def test_every_operation_of_the_programs_is_one_that_plans_use() -> None:
    sources = [path.read_text() for path in (REPOSITORY / "native" / "launcher").glob("*/*.c")]
    known = {name for text in sources for name in re.findall(r'strcmp\((?:op|me\.step), "([a-z-]+)"\)', text)}
    linux = REPOSITORY / "src" / "atoll" / "engines" / "linux"
    said = "".join(path.read_text() for path in (linux / "launcher_protocol.py", linux / "native" / "rootless.py"))
    assert len(known) > 35
    assert {name for name in known if f'"{name}"' not in said} == set()
