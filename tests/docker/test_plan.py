"""What a container is asked to be, without an engine."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest

from atoll.engines.docker import container_plan
from atoll.engines.docker.api import facts
from atoll.engines.docker.api.image_pull import Image
from atoll.engines.docker.connect.agent_volume import Agent
from atoll.engines.host.confinement import seccomp, syscalls
from atoll.errors import EngineUnavailableError, SpecError, UnsupportedError
from atoll.model import Capability, SandboxSpec

INFO = {
    "OSType": "linux",
    "ServerVersion": "24.0",
    "Architecture": "x86_64",
    "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "extfs"]],
    "Runtimes": {"runc": {}, "io.containerd.runc.v2": {}},
    "DefaultRuntime": "runc",
    "DockerRootDir": "/var/lib/docker",
    "MemoryLimit": True,
    "SwapLimit": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "SecurityOptions": ["name=seccomp,profile=default"],
}
WHO = container_plan.identity("0123456789abcdef", "box")
IMAGE = Image("sha256:1", "amd64", {"PATH": "/image/bin", "LANG": "de_DE"})


def made(**spec: Any) -> dict[str, Any]:
    return container_plan.container(
        WHO, SandboxSpec.of(image="x", **spec), facts.parse(INFO), IMAGE, Agent("d" * 64, b""), 1.5
    )


def test_the_walls_are_there_whatever_is_asked_for() -> None:
    host = made()["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert set(host["CapAdd"]) == {
        "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID",
    }  # fmt: skip
    assert host["SecurityOpt"][0] == "no-new-privileges:true"
    assert host["NetworkMode"] == "none"
    assert not host.get("Privileged")
    assert host["IpcMode"] == "private"
    assert "UsernsMode" not in host  # "host" would leave the engine's user namespace
    assert {"/proc/kpageflags", "/sys/kernel", "/proc/cmdline"} <= set(host["MaskedPaths"])
    agent = host["Mounts"][0]
    assert (agent["Type"], agent["Target"], agent["ReadOnly"]) == ("volume", "/.atoll", True)


def test_a_lifetime_is_kept_by_the_agent() -> None:
    assert made(limits={"lifetime_s": 1.5})["Entrypoint"][-2:] == ["--lifetime-ms", "1500"]
    assert "--lifetime-ms" not in made()["Entrypoint"]


def test_the_filter_says_what_the_shared_profile_says() -> None:
    option = made()["HostConfig"]["SecurityOpt"][1]
    profile = json.loads(option.removeprefix("seccomp="))
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert profile["architectures"] == ["SCMP_ARCH_X86_64"]
    assert len(profile["syscalls"]) == len(seccomp.default_profile().rules)
    allowed = {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert set(syscalls.ALLOWED) <= allowed
    assert not {"mount", "ptrace", "bpf", "keyctl", "unshare", "setns", "kexec_load"} & allowed


def test_limits_become_the_engines_and_swap_is_closed() -> None:
    host = made(limits={"memory_bytes": "64m", "cpus": 0.5, "pids": 32, "open_files": 100})["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 64 << 20
    assert host["NanoCpus"] == 500_000_000
    assert host["PidsLimit"] == 32
    assert made(limits={"open_files": 100})["Entrypoint"][-2:] == ["--rlimit-nofile", "100"]


def test_nothing_of_the_image_runs_by_itself() -> None:
    body = made()
    assert body["Entrypoint"][0] == "/.atoll/agent"
    assert body["Cmd"] == []
    assert body["User"] == "0:0"
    assert body["Healthcheck"] == {"Test": ["NONE"]}


def test_the_spec_outranks_the_image_which_outranks_us() -> None:
    env = dict(entry.split("=", 1) for entry in made(env={"LANG": "C", "MINE": "1"})["Env"])
    assert (env["PATH"], env["LANG"], env["MINE"], env["HOME"]) == ("/image/bin", "C", "1", "/root")
    assert env["ATOLL_SANDBOX_ID"] == "box"
    assert env["PYTHONUNBUFFERED"] == "1"


def test_labels_bring_the_spec_back() -> None:
    spec = SandboxSpec.of(image="x", env={"A": "b\n"}, labels={"of": "mine"}, limits={"pids": 9})
    body = container_plan.container(WHO, spec, facts.parse(INFO), IMAGE, Agent("d" * 64, b""), 1.5)
    assert SandboxSpec.model_validate_json(body["Labels"][container_plan.SPEC]) == spec
    assert body["Labels"][container_plan.INSTALLATION] == "0123456789abcdef"


def test_a_read_only_volume_shows_nothing_that_is_mounted_below_it() -> None:
    volumes = [{"host": "/a", "path": "/in/a", "read_only": True}, {"host": "/b", "path": "/in/b"}]
    first, second = made(volumes=volumes)["HostConfig"]["Mounts"][1:]
    assert first["ReadOnly"]
    assert first["BindOptions"]["NonRecursive"]
    assert not second["ReadOnly"]
    assert not second["BindOptions"]["NonRecursive"]


def test_a_writable_volume_is_refused_where_the_filter_has_no_effect() -> None:
    writable = SandboxSpec.of(image="x", volumes=[{"host": "/a", "path": "/in"}])
    read_only = SandboxSpec.of(image="x", volumes=[{"host": "/a", "path": "/in", "read_only": True}])
    container_plan.check_set_id(writable, "runc")
    container_plan.check_set_id(read_only, "runsc")
    for runtime in ("runsc", "kata-runtime"):
        with pytest.raises(SpecError, match="set-uid"):
            container_plan.check_set_id(writable, runtime)


@pytest.mark.parametrize("path", ["/var", "/var/run/docker.sock", "/var/lib/docker/overlay2", "/"])
def test_a_volume_that_would_open_the_walls_is_refused(path: str) -> None:
    spec = SandboxSpec.of(image="x", volumes=[{"host": path, "path": "/in"}])
    with pytest.raises(SpecError, match="would show"):
        container_plan.check(spec, ["/var/lib/docker", os.path.realpath("/var/run/docker.sock")])


@pytest.mark.parametrize("path", ["/.atoll", "/.atoll/run", "/proc/x", "/dev", "/"])
def test_a_volume_that_would_cover_the_walls_is_refused(path: str) -> None:
    with pytest.raises(SpecError, match="reserved"):
        container_plan.check(SandboxSpec.of(image="x", volumes=[{"host": "/a", "path": path}]), [])


def test_what_the_engine_cannot_limit_is_not_declared() -> None:
    assert Capability.DISK not in facts.parse(INFO).capabilities
    assert Capability.DISK in facts.parse({**INFO, "Driver": "btrfs"}).capabilities
    assert Capability.MEMORY not in facts.parse({**INFO, "SwapLimit": False}).capabilities
    assert Capability.PIDS not in facts.parse({**INFO, "PidsLimit": False}).capabilities


def test_the_runtime_is_the_one_asked_for_or_refused() -> None:
    known = facts.parse(INFO)
    assert known.runtime(SandboxSpec(isolation="namespaces")) == "runc"
    with pytest.raises(UnsupportedError, match="gvisor") as caught:
        known.runtime(SandboxSpec(isolation="gvisor"))
    assert "runc" in str(caught.value.hint)
    with_gvisor = facts.parse({**INFO, "Runtimes": {"runc": {}, "runsc": {}}})
    assert with_gvisor.runtime(SandboxSpec(isolation="gvisor")) == "runsc"
    assert with_gvisor.runtime(SandboxSpec()) == "runc"


def test_an_engine_that_no_sandbox_works_on_is_told() -> None:
    known = facts.parse(INFO)
    for broken in (replace(known, architecture="riscv64"), replace(known, seccomp=False)):
        with pytest.raises(EngineUnavailableError):
            broken.require_usable()
    with pytest.raises(EngineUnavailableError, match="Linux containers"):
        facts.parse({**INFO, "OSType": "windows"})


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "x" * 41, "-a", "a b"])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="cannot be the name"):
        container_plan.identity("i", name)


def test_processes_under_another_kernel_cannot_be_counted() -> None:
    info = {**INFO, "Runtimes": {"runc": {}, "runsc": {}}}
    assert Capability.PIDS in facts.parse(info).capabilities
    assert Capability.PIDS not in facts.parse({**info, "DefaultRuntime": "runsc"}).capabilities
    asked = SandboxSpec.of(image="x", isolation="gvisor", limits={"pids": 100})
    with pytest.raises(UnsupportedError, match="pids"):
        facts.parse(info).runtime(asked)
