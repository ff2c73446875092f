"""An agent in a container that Atoll did not make, when the Docker engine is in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from atoll.engines.docker.connect import attached_container
from atoll.engines.docker.connect.attached_container import AttachedContainer
from atoll.errors import AgentUnreachableError
from docker import private_engine
from docker.private_engine import BUSYBOX, docker


@pytest.fixture
def container(docker_host: str) -> Iterator[str]:
    found = docker("run", "-d", "--network", "none", BUSYBOX, "sleep", "10000")
    yield found
    docker("rm", "-f", found)


async def test_a_connection_that_the_engine_does_not_start_is_given_up(
    container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = await AttachedContainer.enter(container, "/work", {}, private_engine.where(), direct=False)
    try:
        monkeypatch.setattr(attached_container, "_CONNECT_S", 0.5, raising=False)
        with private_engine.starting_nothing():
            async with asyncio.timeout(20):
                with pytest.raises(AgentUnreachableError, match="it does not answer"):
                    await visit.connect()
        assert await visit._answers()
    finally:
        await visit.leave()
