"""The names of the Manus example become ours: each once, and a wrong one with a hint of what was meant."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from atoll import Sandbox
from atoll.cli.options import read_spec_file
from atoll.cli.target import called
from atoll.engines.unsafe_none import UnsafeEngine
from atoll.errors import ConflictError, SandboxNotFoundError, SpecError
from atoll.manager.request import Request
from atoll.model import Cause, ExecutionResult, Handle, SandboxSpec, manus_names
from atoll.model.network_policy import NetworkRules
from atoll.network.decision import PolicyEvaluator
from atoll.sandbox.export import Export
from atoll.service.models.sandbox_request import ForkRequest, SandboxRequest, SandboxSettings

GIB = 1 << 30
REST: dict[str, Any] = dict.fromkeys(("labels", "env", "name", "owner", "key", "lifetime", "timeout", "engine"))
EXAMPLE: dict[str, Any] = {
    "image": "manus-sandbox:latest",
    "resources": {"cpu": 2, "memory": "4G", "disk": "20G"},
    "timeout": 3600,
    "network": {"allowOutbound": True, "allowedDomains": ["*"]},
}


def test_the_example_is_a_spec() -> None:
    spec = SandboxSpec.of(**EXAMPLE)
    limits = spec.limits
    assert (limits.cpus, limits.memory_bytes, limits.disk_bytes, limits.lifetime_s) == (2, 4 * GIB, 20 * GIB, 3600)
    assert isinstance(spec.network, NetworkRules)
    assert [rule.domain for rule in spec.network.rules] == ["*"]
    assert spec == SandboxSettings.model_validate(EXAMPLE).spec()


def test_the_example_is_a_request_to_a_server() -> None:
    wanted = SandboxRequest.model_validate({**EXAMPLE, "taskId": "t-1", "setup": ["true"]})
    assert (wanted.lifetime, wanted.task_id) == (3600, "t-1")
    assert wanted.settings is not None
    assert wanted.settings.spec() == SandboxSpec.of(
        **{name: value for name, value in EXAMPLE.items() if name != "timeout"}, setup=["true"]
    )


@pytest.mark.parametrize(
    "values",
    [
        {"cpu": 2, "memory": "1g", "disk": "2g", "pids": 50},
        {"resources": {"cpu": 2, "memory": "1g", "disk": "2g", "pids": 50}},
        {"limits": {"cpus": 2, "memory": "1g", "diskBytes": 2 * GIB, "pids": 50}},
        {"limits": {"pids": 50}, "resources": {"cpu": 2}, "memory": GIB, "disk_bytes": 2 * GIB},
    ],
)
def test_limits_are_the_same_wherever_they_are_written(values: dict[str, Any]) -> None:
    limits = SandboxSpec.of(**values).limits
    assert (limits.cpus, limits.memory_bytes, limits.disk_bytes, limits.pids) == (2, GIB, 2 * GIB, 50)


@pytest.mark.parametrize(
    ("values", "said", "hint"),
    [
        ({"cpu": 1, "cpus": 2}, "cpus is given twice, as 'cpu' and 'cpus'", "Give only 'cpus'."),
        ({"resources": {"cpu": 1, "cpus": 1}}, "cpus is given twice", "Give only 'cpus'."),
        ({"resources": {"memory": "1g"}, "memory": "2g"}, "'memory_bytes' is given twice, by itself and in", "one of"),
        ({"limits": {"cpu": 1}, "resources": {"cpu": 1}}, "'cpus' is given twice", "one of"),
        ({"timeout": 5, "limits": {"lifetime_s": 6}}, "'lifetime_s' is given twice", "one of"),
        ({"timeout": 5, "lifetime": 6}, "lifetime_s is given twice", "Give only"),
        ({"workDir": "/a", "work_dir": "/a"}, "work_dir is given twice", "Give only"),
        ({"allowOutbound": True, "network": "all"}, "'allow_outbound' and 'network' both set", "Give only one."),
        ({"allowOutbound": True, "network": {"allow_outbound": True}}, "'allow_outbound' is given twice", "one of"),
        ({"memroy": "1g"}, "'memroy' is not an option of a sandbox", "Did you mean 'memory'?"),
        ({"allowDomains": ["a.example"]}, "'allowDomains' is not an option", "Did you mean 'allowed_domains'?"),
        ({"resources": {"memmory": "1g"}}, "'memmory' is not an option of resources", "Did you mean 'memory'?"),
        ({"engin": "native"}, "'engin' is not an option", "Did you mean 'engine'?"),
        ({"zzz": 1}, "'zzz' is not an option", "There are "),
        ({"resources": "big"}, "resources is an object with names such as 'cpu'", None),
        ({"resources": {"cpu": True}}, "cpus must be a number, not True", None),
        ({"timeout": True}, "lifetime_s must be a number, not True", None),
        ({"cpu": -1}, "limits.cpus", None),
        ({"memory": "4 apples"}, "'4 apples' is not a size", None),
        ({"timeout": "soon"}, "limits.lifetime_s", None),
        ({"timeout": 0}, "limits.lifetime_s", None),
        ({"allowedDomains": "example.com"}, "allowed_domains must be a list", None),
        ({"allowedDomains": 5}, "allowed_domains must be a list", None),
        ({"network": {"allowOutbound": "yes"}}, "true or false", None),
        ({"network": {"alowOutbound": True}}, "Did you mean 'allow_outbound'?", None),
        ({"task_id": "../etc"}, "'../etc' cannot be the id of a task", "Use up to 128"),
        ({"taskId": 5}, "'5' cannot be the id of a task", "Use up to 128"),
        ({"setup": "pip install x"}, "a list of command lines", None),
        ({"setup": ["true", " "]}, "' ' is not a command line", None),
        ({"setup": ["true", 5]}, "'5' is not a command line", None),
        ({"setup": ["true"] * 65}, "setup", None),
        ({"setup": ["true"], "setup_timeout": 0}, "setup_timeout_s", None),
        ({"setup": ["true"], "setupTimeout": 1e9}, "setup_timeout_s", None),
    ],
)
def test_what_is_wrong_is_refused_with_a_hint(values: dict[str, Any], said: str, hint: str | None) -> None:
    with pytest.raises(SpecError) as refused:
        SandboxSpec.of(**values)
    assert said in refused.value.reason
    if hint is not None:
        assert hint in (refused.value.hint or "")


@pytest.mark.parametrize("described", [5, "host", ["image"], {5: 1}])
def test_what_is_no_description_is_refused(described: Any) -> None:
    for make in (SandboxSpec.described, Sandbox, lambda config: Request.of(config, None, **REST)):
        with pytest.raises(SpecError):
            make(described)


@pytest.mark.parametrize(
    ("model", "values", "said"),
    [
        (SandboxRequest, {"settings": {}, "image": "x"}, "'settings' and 'image' both describe the sandbox"),
        (SandboxRequest, {"lifetime_s": 5, "timeout": 6}, "lifetime is given twice"),
        (SandboxRequest, {"settings": {"memroy": 1}}, "Did you mean 'memory'?"),
        (SandboxRequest, {"lables": {}}, "Did you mean 'labels'?"),
        (SandboxRequest, {"taskId": "a b"}, "task_id"),
        (ForkRequest, {"cont": 2}, "Did you mean 'count'?"),
        (ForkRequest, {"dropConnections": True, "drop_connections": True}, "drop_connections is given twice"),
    ],
)
def test_requests_are_refused_with_a_hint(
    model: type[SandboxRequest | ForkRequest], values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        model.model_validate(values)


def test_a_star_allows_every_domain_and_nothing_else() -> None:
    judge = PolicyEvaluator(SandboxSpec.of(allowedDomains=["*"]).network)
    assert judge.name("any.example", 443, "web")
    assert judge.lookup("any.example")
    assert not judge.name("any.example", 22, "tcp")
    for private in ("10.0.0.1", "192.168.1.1", "172.16.0.1", "127.0.0.1", "169.254.169.254", "fd00::1", "100.64.0.1"):
        assert not judge.answer(ip_address(private), 443), private
        assert not judge.address(ip_address(private), 443, "web"), private


@pytest.mark.parametrize(
    ("cause", "code", "stderr", "said"),
    [
        (Cause.EXIT, 0, b"", None),
        (Cause.EXIT, 3, b"", "the command failed with exit code 3"),
        (Cause.EXIT, 1, b"first\nlast\x1b[31m one\n\n", "the command failed with exit code 1: last[31m one"),
        (Cause.TIMEOUT, 124, b"", "the command was killed at its timeout"),
        (Cause.SIGNAL, 139, b"", "the command was ended by signal 11"),
        (Cause.OUT_OF_MEMORY, 137, b"", "the command hit the sandbox's limit of memory (exit code 137)"),
        (Cause.LOST, 255, b"", "the command did not end by itself: lost (exit code 255)"),
    ],
)
def test_a_failed_result_says_why(cause: Cause, code: int, stderr: bytes, said: str | None) -> None:
    result = ExecutionResult.captured(b"out", stderr, exit_code=code, duration_s=0.0, cause=cause)
    assert (result.exitCode, result.error) == (code, said)
    assert result.success is (said is None)


def test_an_error_is_short_however_much_was_written() -> None:
    result = ExecutionResult.captured(b"", b"x" * (8 << 20), exit_code=1, duration_s=0.0, cause=Cause.EXIT)
    assert len(result.error or "") < 600


@pytest.mark.parametrize("names", [{"captureOutpt": True}, {"captureOutput": "no"}, {"cwd": "/"}])
def test_wrong_names_of_a_command_are_refused(names: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        manus_names.captures(names, None)
    with pytest.raises(SpecError, match="capture_output is given twice"):
        manus_names.captures({"captureOutput": True}, True)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"source": "/output/*/x"}, {"source": ""}, {"source": 5}, {"target": ""}, {"target": 5}),
        *({"max_bytes": 0}, {"max_items": "x"}, {"timeout_s": True}),
    ],
)
def test_an_export_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        Export(**{"target": "/tmp/x", **wrong})


def test_the_command_line_finds_a_sandbox_by_id_name_or_task() -> None:
    def handle(id: str, **labels: str) -> Handle:
        return Handle("x", id, SandboxSpec(labels=labels), 0.0)

    engine = UnsafeEngine.__new__(UnsafeEngine)  # nothing is asked of it
    found = [
        (engine, handle("a", task_id="t")),
        (engine, handle("b", **{"atoll.name": "box"}, task_id="u")),
        (engine, handle("c", task_id="u")),
        (engine, handle("t")),
    ]
    assert [called(text, found)[1].sandbox_id for text in ("a", "box", "t")] == ["a", "b", "t"]
    with pytest.raises(ConflictError) as refused:
        called("u", found)
    assert refused.value.hint == "Name one by its id: b, c."
    with pytest.raises(SandboxNotFoundError):
        called("nothing", found)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "memroy = 1", "'memroy' is not an option"),
        ("a.toml", "memory = ", "is not TOML"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.json", "[]", "does not describe a sandbox"),
        ("a.json", " " * (1 << 21), "is larger than"),
    ],
)
def test_a_file_that_describes_no_sandbox_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as refused:
        read_spec_file(tmp_path / name)
    assert said in refused.value.reason


def test_a_file_describes_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(EXAMPLE))
    assert SandboxSpec.of(**read_spec_file(tmp_path / "a.json")) == SandboxSpec.of(**EXAMPLE)
