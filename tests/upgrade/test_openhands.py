"""The sandboxes that OpenHands had before an upgrade: its service finds them, by id and by session key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.openhands import ProcessSandboxService
from atoll.settings import Settings
from upgrade.conftest import Installation
from upgrade.version_before import OldTree


def test_a_service_goes_on_with_what_the_version_before_had(
    old: OldTree, installation: Installation, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine("process", installation.settings)
    facts = old.run("openhands.py", {}, installation.environment)
    old.remove()
    asyncio.run(found(facts["id"], facts["key"]))


async def found(sandbox_id: str, session_key: str | None) -> None:
    service = ProcessSandboxService(user_id="ann")
    try:
        assert [info.id for info in (await service.search_sandboxes()).items] == [sandbox_id]
        info = await service.get_sandbox(sandbox_id)
        assert info is not None
        assert info.session_api_key == session_key
        assert session_key
        by_key = await service.get_sandbox_by_session_api_key(session_key)
        assert by_key is not None
        assert by_key.id == sandbox_id
        assert await service.delete_sandbox(sandbox_id)
    finally:
        await service.aclose()
