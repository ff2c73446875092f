"""Each option of a sandbox is in every surface under one name and means the same there."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from atoll import AsyncSandbox, SandboxSpec
from atoll.cli.options import SandboxFlags, make_sandbox
from atoll.manager.request import Request
from atoll.model import NAME_LABEL
from atoll.sandbox.options import SpecOptions
from atoll.service.models.sandbox_request import SandboxRequest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import generate_options

SAMPLES: dict[str, tuple[Any, Any]] = {
    "image": ("debian:12", "debian:12"),
    "isolation": ("gvisor", "gvisor"),
    "memory": ("512m", "512m"),
    "cpus": (1.5, 1.5),
    "pids": (77, 77),
    "disk": ("2g", "2g"),
    "inodes": (5000, 5000),
    "open_files": (99, 99),
    "shm": ("1g", "1g"),
    "env": ({"A": "b=c"}, ["A=b=c"]),
    "volumes": (["/srv:/data:ro"], ["/srv:/data:ro"]),
    "work_dir": ("/srv/work", "/srv/work"),
    "user": ("bob:users", "bob:users"),
    "hostname": ("box", "box"),
    "network": ({"allowed_domains": ["pypi.org"]}, "pypi.org"),
    "lifetime": (600.0, 600.0),
    "setup": (["true"], ["true"]),
    "setup_timeout": (5.0, 5.0),
    "start": (
        [{"name": "web", "command": "true", "restart": "never"}],
        ['{"name":"web","command":"true","restart":"never"}'],
    ),
    "ready": ("8080/health", "8080/health"),
    "sudo": (True, True),
    "prewarm": ("memory", "memory"),
    "undo": (True, True),
    "name": ("web", "web"),
    "task_id": ("t-1", "t-1"),
    "labels": ({"run": "1"}, ["run=1"]),
    "ports": ({"WEB": 8000}, ["WEB=8000"]),
}
"""A value of each option as programs give it, and as a flag has it."""


def by_program(option: str) -> SandboxSpec:
    return AsyncSandbox(**{option: SAMPLES[option][0]}).spec


def by_manager(option: str) -> SandboxSpec:
    request = Request.of(**{option: SAMPLES[option][0]})
    names = {} if request.name is None else {NAME_LABEL: request.name}
    limits = request.spec.limits.model_copy(update={"lifetime_s": request.lifetime_s})
    return request.spec.model_copy(update={"labels": {**request.spec.labels, **names}, "limits": limits})


def by_request(option: str) -> SandboxSpec:
    """As a server understands it, which keeps some of it beside the spec."""
    wanted = SandboxRequest.model_validate({option: SAMPLES[option][0]})
    spec = wanted.settings.spec() if wanted.settings is not None else SandboxSpec()
    labels = dict(wanted.labels)
    labels |= {} if wanted.name is None else {NAME_LABEL: wanted.name}
    labels |= {} if wanted.task_id is None else {"task_id": wanted.task_id}
    ports = {port.name: str(port.port) for port in wanted.exposed_ports}
    limits = spec.limits if wanted.lifetime is None else spec.limits.model_copy(update={"lifetime_s": wanted.lifetime})
    return spec.model_copy(update={"labels": labels, "env": {**spec.env, **ports, **wanted.env}, "limits": limits})


def by_flags(option: str) -> SandboxSpec:
    return make_sandbox(SandboxFlags(**{option: SAMPLES[option][1]})).spec


@pytest.mark.parametrize("surface", [by_manager, by_request, by_flags])
@pytest.mark.parametrize("option", SAMPLES)
def test_an_option_means_the_same_in_every_surface(option: str, surface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_URL", "http://127.0.0.1:1")  # ports are exposed by servers only
    assert by_program(option) == surface(option)
    assert by_program(option) != SandboxSpec()


def test_every_option_has_been_tried() -> None:
    names = AsyncSandbox.__init__.__annotations__
    assert SAMPLES.keys() == (SpecOptions.__optional_keys__ & names.keys()) | {"name"}
    assert SAMPLES.keys() == {each.name for each in fields(SandboxFlags)} - {"file", "engine"}


def test_the_table_of_options_has_no_empty_cell_without_a_reason_and_is_current() -> None:
    found = generate_options.surfaces()
    assert not list(generate_options.problems(found))
    assert generate_options.TARGET.read_text() == generate_options.generate(found)


@pytest.mark.parametrize("surface", generate_options.SURFACES)
def test_an_option_that_is_added_in_one_place_only_is_noticed(surface: str) -> None:
    found = generate_options.surfaces()
    found[surface].add("gpus", "gpus")
    assert len(list(generate_options.problems(found))) == len(generate_options.SURFACES) - 1


def test_a_reason_that_has_become_wrong_is_noticed() -> None:
    found = generate_options.surfaces()
    found[generate_options.CLI].add("idle_timeout", "--idle-timeout")
    assert len(list(generate_options.problems(found))) == 1
    assert list(generate_options.problems({name: generate_options.Surface() for name in found}))
