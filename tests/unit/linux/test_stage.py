from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.engines.linux import oci_bundle, stage
from atoll.engines.linux.plan import Plan, for_virtual_kernel

PlanOf = Callable[..., Plan]


def words(plan: Plan) -> list[str]:
    return stage.operations(plan, Path("/mnt")).decode().split("\0")[:-1]


def test_no_option_of_a_mount_names_a_path_of_the_host(plan_of: PlanOf) -> None:
    listed = words(plan_of(volumes=[{"host": "/srv/secret", "path": "/data"}]))
    options = [word for word in listed if "lowerdir=" in word]
    assert len(options) == 2
    assert not any("/images" in word or "/layers" in word or "/srv" in word for word in options)


def test_layers_are_mapped_and_read_only_and_the_writable_one_is_mapped(plan_of: PlanOf) -> None:
    listed = words(plan_of())
    clones = {listed[at + 1]: listed[at + 3] for at, word in enumerate(listed) if word == "clone"}
    assert clones == {
        "/images/1": "ro,nosuid,nodev,idmap",
        "/layers/a": "nosuid,nodev,idmap",
        "/usr": "ro,nosuid,nodev,idmap",
    }


def test_sources_are_taken_before_the_stage_covers_anything(plan_of: PlanOf) -> None:
    listed = words(plan_of(volumes=[{"host": "/mnt/data", "path": "/data"}]))
    assert max(at for at, word in enumerate(listed) if word == "clone") < listed.index("stage")


def test_the_image_is_only_touched_inside_the_sandbox(plan_of: PlanOf) -> None:
    listed = words(plan_of())
    assert listed.index("enter") < min(at for at, word in enumerate(listed) if word in ("place", "mask", "directory"))


def test_a_path_with_a_nul_byte_is_refused(plan_of: PlanOf) -> None:
    plan = for_virtual_kernel(plan_of(), Path("/bin/agent"), "/a\0b")
    with pytest.raises(ValueError, match="NUL"):
        stage.operations(plan, Path("/mnt"))


def test_the_runtime_is_left_with_the_process_the_pid_namespace_and_proc(plan_of: PlanOf) -> None:
    config = oci_bundle.config(plan_of(limits={"pids": 7}), Path("/mnt"), "/atoll/a")
    assert [space["type"] for space in config["linux"]["namespaces"]] == ["pid", "mount", "cgroup", "user"]
    assert config["linux"]["cgroupsPath"] == "/atoll/a"
    assert config["linux"]["resources"]["pids"] == {"limit": 7}
    assert config["process"]["noNewPrivileges"] is True


def test_what_proc_tells_is_covered_once_there_is_one(plan_of: PlanOf) -> None:
    plan = plan_of()
    listed = stage.covers(plan).decode().split("\0")
    assert {path for path in plan.masked_paths if path.startswith("/proc/")} <= set(listed)
    assert all(path not in listed for path in plan.masked_paths if not path.startswith("/proc/"))
    for shadow in plan.shadows:
        assert listed[listed.index(shadow.path) - 1 : listed.index(shadow.path) + 2] == [
            "shadow",
            shadow.path,
            shadow.content,
        ]


def test_the_entry_has_three_capabilities_more_and_is_told_to_give_them_up(plan_of: PlanOf) -> None:
    process = oci_bundle.config(plan_of(), Path("/mnt"), "/atoll/a")["process"]
    assert set(process["capabilities"]["bounding"]) - {f"CAP_{name}" for name in plan_of().capabilities} == {
        "CAP_SETPCAP",
        "CAP_SYS_CHROOT",
        "CAP_SYS_ADMIN",
    }
    assert "inheritable" not in process["capabilities"]
    assert "ambient" not in process["capabilities"]
    assert process["args"][:9] == ["/proc/self/fd/4", "within", "/rootfs", "/workspace", "fb", "5", "6", "7", "--"]


def test_swap_is_closed(plan_of: PlanOf) -> None:
    config = oci_bundle.config(plan_of(limits={"memory_bytes": "64m"}), Path("/mnt"), "/a")
    assert config["linux"]["resources"]["memory"] == {"limit": 64 << 20, "swap": 64 << 20}
