"""Specs that come with Atoll, and the size of /dev/shm."""

from __future__ import annotations

import pytest

from atoll.errors import SpecError
from atoll.model import SandboxSpec
from atoll.model.network_policy import NetworkRules
from atoll.network.decision import PolicyEvaluator
from atoll.service.models.sandbox_request import SandboxSettings


def test_the_sandbox_of_the_manus_example_is_a_named_spec() -> None:
    spec = SandboxSpec.named("manus")
    limits = spec.limits
    assert (spec.image, limits.cpus, limits.memory_bytes, limits.disk_bytes) == ("computer", 2, 4 << 30, 20 << 30)
    assert limits.lifetime_s == 3600
    assert isinstance(spec.network, NetworkRules)
    assert PolicyEvaluator(spec.network).name("any.example", 443, "web")
    assert SandboxSettings.of(spec).spec() == spec


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SpecError, match="there is no spec"):
        SandboxSpec.named("other")


def test_shared_memory_is_part_of_the_memory() -> None:
    assert SandboxSpec.of(memory="1g", shm="1g").limits.shm_bytes == 1 << 30
    with pytest.raises(SpecError, match="shm"):
        SandboxSpec.of(memory="1g", shm="2g")
