"""Names and lists of sandboxes on a server."""

from __future__ import annotations

import pytest

from atoll import AsyncSandbox, ConflictError, Sandbox, SandboxNotFoundError

pytestmark = pytest.mark.usefixtures("environment")


async def test_a_name_is_that_of_the_sandbox_on_the_server() -> None:
    async with AsyncSandbox(name="web-1", labels={"run": "n"}, task_id="t-5") as sandbox:
        (listed,) = await AsyncSandbox.list(labels={"run": "n"})
        assert (listed.name, listed.labels) == ("web-1", {"run": "n", "task_id": "t-5"})
        assert listed.id == sandbox.access.listed_id()
        await sandbox.write_file("f", "content")
        for known in ("web-1", listed.id, sandbox.id):
            found = await AsyncSandbox.attach(known)
            assert await found.read_file("f") == "content"
            assert found.spec.labels["atoll.name"] == "web-1"
            await found.detach()
        with pytest.raises(ConflictError):
            await AsyncSandbox.create(name="web-1")
    with pytest.raises(SandboxNotFoundError):
        await AsyncSandbox.attach("web-1")


async def test_a_sandbox_without_a_name_has_none_in_the_list() -> None:
    async with AsyncSandbox(labels={"run": "none"}) as sandbox:
        (listed,) = await AsyncSandbox.list(labels={"run": "none"})
        assert listed.name is None
        assert listed.id == sandbox.access.listed_id()


def test_the_class_works_without_await() -> None:
    with Sandbox.create(labels={"run": "sync"}) as sandbox:
        assert [each.labels for each in Sandbox.list(labels={"run": "sync"})] == [{"run": "sync"}]
        assert sandbox.exec("echo 1").stdout == "1\n"
