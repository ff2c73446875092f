from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.engines.linux.plan.sandbox_plan import (
    Bind,
    DeviceDirectory,
    Kernel,
    Plan,
    for_virtual_kernel,
)
from atoll.errors import SpecError

PlanOf = Callable[..., Plan]


def test_a_plan_depends_on_its_arguments_only(plan_of: PlanOf) -> None:
    assert plan_of(hostname="x") == plan_of(hostname="x")


def test_there_are_at_most_eight_capabilities_and_none_reaches_beyond_the_sandbox(plan_of: PlanOf) -> None:
    capabilities = plan_of().capabilities
    assert len(capabilities) <= 8
    assert set(capabilities) <= {
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "SETUID",
        "SETGID",
        "KILL",
        "NET_BIND_SERVICE",
    }
    assert plan_of().capability_mask == 0xFB


def test_every_namespace_is_new_and_network_ipc_and_name_belong_to_the_host(plan_of: PlanOf) -> None:
    plan = plan_of()
    assert plan.namespaces == {"user", "mount", "pid", "ipc", "uts", "net", "cgroup"}
    assert plan.host_owned == {"ipc", "uts", "net"}


def test_root_inside_is_nobody_outside(plan_of: PlanOf) -> None:
    assert plan_of().ids.first >= 100_000
    assert plan_of().ids.count == 65_536
    assert plan_of().no_new_privileges


def test_no_mount_lets_devices_or_set_uid_through_but_our_own_dev(plan_of: PlanOf) -> None:
    for mount in plan_of(volumes=[{"host": "/srv", "path": "/data"}]).mounts:
        assert "nosuid" in mount.flags
        terminals = isinstance(mount, Kernel) and mount.kind == "devpts"
        assert "nodev" in mount.flags or isinstance(mount, DeviceDirectory) or terminals


def test_dev_is_our_own_with_six_harmless_devices(plan_of: PlanOf) -> None:
    (devices,) = (mount for mount in plan_of().mounts if isinstance(mount, DeviceDirectory))
    assert {device.name for device in devices.devices} == {"null", "zero", "full", "random", "urandom", "tty"}


@pytest.mark.parametrize(
    "path",
    [
        *(f"/proc/{name}" for name in ("kcore", "keys", "timer_list", "kallsyms", "sysrq-trigger", "bus", "irq", "fs")),
        *(f"/proc/{name}" for name in ("slabinfo", "vmallocinfo", "config.gz", "cmdline", "partitions", "interrupts")),
        *(
            f"/sys/{name}"
            for name in ("firmware", "kernel", "fs", "block", "module", "bus", "devices/virtual/powercap")
        ),
        "/sys/devices/system/cpu/cpu0/thermal_throttle",
    ],
)
def test_what_tells_about_the_machine_is_masked(plan_of: PlanOf, path: str) -> None:
    assert path in plan_of().masked_paths


def test_limits_become_numbers_of_the_kernel(plan_of: PlanOf) -> None:
    plan = plan_of(limits={"memory_bytes": "64m", "cpus": 0.5, "pids": 32, "open_files": 99})
    assert plan.cgroup == CgroupLimits(memory_bytes=64 << 20, cpu_quota_us=50_000, pids=32)
    assert {limit.name: limit.value for limit in plan.rlimits}["NOFILE"] == 99


def test_the_smallest_share_of_a_cpu_is_one_the_kernel_takes(plan_of: PlanOf) -> None:
    assert plan_of(limits={"cpus": 0.0001}).cgroup.cpu_quota_us == 1000


def test_core_dumps_and_real_time_are_closed(plan_of: PlanOf) -> None:
    limits = {limit.name: limit.value for limit in plan_of().rlimits}
    assert limits["CORE"] == 0
    assert limits["RTPRIO"] == 0


def test_nothing_of_our_environment_is_inside(plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
    names = {entry.partition("=")[0] for entry in plan_of(env={"A": "b"}).env}
    ours = {"PATH", "HOME", "LANG", "TERM", "HOSTNAME", "SHELL", "USER", "LOGNAME", "PYTHONUNBUFFERED"}
    assert names == ours | {"ATOLL_SANDBOX_ID", "A"}


def test_the_spec_wins_over_the_default_environment(plan_of: PlanOf) -> None:
    assert "PATH=/mine" in plan_of(env={"PATH": "/mine"}).env


def test_volumes_come_parents_first_and_read_only_when_asked(plan_of: PlanOf) -> None:
    plan = plan_of(
        volumes=[{"host": "/srv/b", "path": "/data/sub", "read_only": True}, {"host": "/srv/a", "path": "/data"}]
    )
    binds = [mount for mount in plan.mounts if isinstance(mount, Bind)]
    assert [bind.target for bind in binds] == ["/data", "/data/sub"]
    assert [("ro" in bind.flags) for bind in binds] == [False, True]


@pytest.mark.parametrize("path", ["/proc", "/proc/sys", "/sys", "/dev/shm", "/"])
def test_a_volume_cannot_cover_a_wall(plan_of: PlanOf, path: str) -> None:
    with pytest.raises(SpecError, match="cannot be mounted"):
        plan_of(volumes=[{"host": "/srv", "path": path}])


def test_two_sandboxes_do_not_share_a_boot_id(plan_of: PlanOf) -> None:
    shadows = {shadow.path: shadow.content for shadow in plan_of().shadows}
    assert set(shadows) == {
        "/proc/sys/kernel/pid_max",
        "/proc/sys/kernel/ns_last_pid",
        "/proc/sys/kernel/random/boot_id",
    }
    assert shadows["/proc/sys/kernel/random/boot_id"] != Path("/proc/sys/kernel/random/boot_id").read_text()


def test_a_virtual_kernel_gets_files_only(plan_of: PlanOf) -> None:
    plan = for_virtual_kernel(plan_of(volumes=[{"host": "/srv", "path": "/data"}]), Path("/bin/agent"), "/.agent")
    assert [type(mount) for mount in plan.mounts] == [Bind, Bind]
    assert plan.masked_paths == ()
    assert plan.ids == plan_of().ids
