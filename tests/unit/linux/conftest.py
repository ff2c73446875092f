"""What the tests of the Linux engines share. Those that touch the machine say so by these fixtures."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.linux.plan.sandbox_plan import HostFacts, IdRange, Plan, Root, make_plan
from atoll.model import SandboxSpec
from needs import missing, need


@pytest.fixture
def root() -> None:
    need("root")


@pytest.fixture
def group(root: None) -> Iterator[Group]:
    """A control group of its own on the real hierarchy. Nothing of it stays."""
    hierarchy = Hierarchy.find()
    if not hierarchy.writable():
        missing("control groups are not writable here")
    group = Group(hierarchy, f"/atoll-test-{secrets.token_hex(4)}")
    yield group
    group.remove()


@pytest.fixture
def plan_of() -> Callable[..., Plan]:
    def make(**spec: object) -> Plan:
        tree = Root((Path("/images/1"),), Path("/layers/a"), "rootfs", Path("/usr"))
        return make_plan(
            SandboxSpec.of(**spec), HostFacts(), tree, IdRange(0x7000_0000), sandbox_id="a", argv=("atoll-agent",)
        )

    return make
