"""What runs inside containers at the beginning: hooks, what the labels of an image start, and sudo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.engines.docker.engine import DockerEngine
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from docker.private_engine import DEBIAN, docker

NAME = "atoll-test:inside"
START = """LABEL atoll.start='["touch /tmp/up; exec sleep 1000"]'"""
PREPARE = """
mkdir -p /etc/atoll/hooks
for hook in created forked rolled-back; do
  printf '#!/bin/sh\\necho $ATOLL_HOOK $(id -u) >> /etc/notes\\n' > /etc/atoll/hooks/$hook
  chmod 755 /etc/atoll/hooks/$hook
done
grep -q ^user: /etc/passwd || echo user:x:1000:1000::/tmp:/bin/sh >> /etc/passwd
echo other:x:1001:1001::/tmp:/bin/sh >> /etc/passwd
ln -s /run/atoll/sudo /usr/bin/sudo
"""


@pytest.fixture
def image(docker_host: str) -> Iterator[str]:
    made = docker("create", DEBIAN, "sh", "-c", PREPARE).strip()
    docker("start", "-a", made)
    docker(
        "commit",
        "-c",
        START,
        "-c",
        "LABEL atoll.sudo=true",
        made,
        NAME,
    )
    docker("rm", made)
    yield NAME
    docker("rmi", NAME)


async def test_hooks_start_commands_and_sudo(engine: DockerEngine, settings: Settings, image: str) -> None:
    async with AsyncSandbox(engine=engine, settings=settings, image=image, ready="test -e /tmp/up") as sandbox:
        assert await sandbox.read_file("/etc/notes") == "created 0\n"
        assert [each.state for each in await sandbox.start_commands()] == ["running"]
        assert (await sandbox.exec("echo x | sudo sh -c 'cat; id -u'", user="user")).stdout == "x\n0\n"
        assert not (await sandbox.exec("sudo id -u", user="other")).success
        await sandbox.rollback(await sandbox.checkpoint())
        assert await sandbox.read_file("/etc/notes") == "created 0\nrolled-back 0\n"
        assert [each.state for each in await sandbox.start_commands()] == ["running"]
        assert (await sandbox.exec("sudo id -u", user="user")).stdout == "0\n"
