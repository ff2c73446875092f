"""`SandboxConfig`: every setting of OpenHands's, with its effect or with the reason why it has none."""

from __future__ import annotations

import os

import pytest

from atoll.compat.openhands.config import REFUSED
from atoll.openhands import SandboxConfig

DEFAULTS = {
    "remote_runtime_api_url": "http://localhost:8000",
    "local_runtime_url": "http://localhost",
    "keep_runtime_alive": False,
    "pause_closed_runtimes": True,
    "rm_all_containers": False,
    "api_key": None,
    "base_container_image": "nikolaik/python-nodejs:python3.12-nodejs22",
    "runtime_container_image": None,
    "user_id": os.getuid(),
    "timeout": 120,
    "remote_runtime_init_timeout": 180,
    "remote_runtime_api_timeout": 180,
    "remote_runtime_enable_retries": True,
    "remote_runtime_class": None,
    "enable_auto_lint": False,
    "use_host_network": False,
    "additional_networks": [],
    "runtime_extra_build_args": None,
    "initialize_plugins": True,
    "force_rebuild_runtime": False,
    "runtime_extra_deps": None,
    "runtime_startup_env_vars": {},
    "browsergym_eval_env": None,
    "platform": None,
    "close_delay": 3600,
    "remote_runtime_resource_factor": 1,
    "enable_gpu": False,
    "docker_runtime_kwargs": None,
    "selected_repo": None,
    "trusted_dirs": [],
    "vscode_port": None,
    "volumes": None,
    "cuda_visible_devices": None,
}


def test_names_and_defaults_are_those_of_upstream_but_for_the_address() -> None:
    found = SandboxConfig().model_dump()
    assert found.pop("runtime_binding_address") == "127.0.0.1", "upstream listens on every interface"
    assert found == DEFAULTS
    assert SandboxConfig(base_container_image=None).base_container_image == DEFAULTS["base_container_image"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_do_not_have_is_refused_with_the_reason(name: str) -> None:
    allowed, why = REFUSED[name]
    other: object = {bool: not allowed, list: ["x"], type(None): "x"}[type(allowed)]
    if name in ("docker_runtime_kwargs", "runtime_extra_build_args"):
        other = {"privileged": True} if name == "docker_runtime_kwargs" else ["--x"]
    with pytest.raises(ValueError, match="Invalid sandbox configuration: ") as refused:
        SandboxConfig.from_toml_section({name: other})
    assert why in str(refused.value)
    assert SandboxConfig.from_toml_section({name: allowed})["sandbox"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"no_such_setting": 1},
        {"timeout": 0},
        {"timeout": "soon"},
        {"remote_runtime_resource_factor": 3},
        {"remote_runtime_class": "sysbox"},
        {"platform": "linux/s390x"},
        {"volumes": "/a"},
        {"volumes": "/a:b"},
        {"volumes": "/a:/b:rwx"},
        {"vscode_port": 70000},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Invalid sandbox configuration: "):
        SandboxConfig.from_toml_section(wrong)


def test_volumes_and_variables() -> None:
    found = SandboxConfig(volumes="/a:/b, /c:/d:ro").mounts
    assert [(each.host_path, each.container_path, each.mode) for each in found] == [
        ("/a", "/b", "rw"),
        ("/c", "/d", "ro"),
    ]
    config = SandboxConfig.from_env(
        {"SANDBOX_TIMEOUT": "7", "SANDBOX_RUNTIME_STARTUP_ENV_VARS": '{"A": "b"}', "SANDBOX_API_KEY": "[x"}
    )
    assert (config.timeout, config.runtime_startup_env_vars, config.api_key) == (7, {"A": "b"}, "[x")
