"""OpenHands's `RemoteSandboxService`, as Atoll has it, on a real server: the same life, the sandboxes elsewhere."""

from __future__ import annotations

import httpx

from atoll.openhands import RemoteSandboxService, SandboxStatus, sandbox_service
from atoll.settings import Settings
from server.conftest import Person
from server.running import RunningServer, everything


async def test_its_sandboxes_live_on_the_server(
    server: RunningServer, ann: Person, client: httpx.Client, session_settings: Settings
) -> None:
    chosen = {
        "RUNTIME": "remote",
        "SANDBOX_API_KEY": ann.key,
        "SANDBOX_REMOTE_RUNTIME_API_URL": f"{server.url}/runtime",
    }
    service = sandbox_service(chosen, user_id="somebody", settings=session_settings, network="none")
    assert isinstance(service, RemoteSandboxService)
    async with service:
        info = await service.start_sandbox(sandbox_id="chosen")
        assert (info.id, info.status) == ("chosen", SandboxStatus.RUNNING)
        assert len(everything(client)) == 1
        record = (await service._manager().list_sandboxes(name="chosen"))[0]
        sandbox = await service._manager().get_sandbox(record.id)
        await (await sandbox.start(["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"])).detach()
        look = "import socket; socket.create_connection(('127.0.0.1', 8000))"
        await sandbox.exec(f'until python3 -c "{look}" 2>/dev/null; do sleep 0.05; done')
        url = next(each.url for each in info.exposed_urls or () if each.name == "AGENT_SERVER")
        async with httpx.AsyncClient(trust_env=False, verify=False) as browser:
            assert (await browser.get(url)).status_code == 200
        assert await service.pause_sandbox("chosen")
        assert [each["status"] for each in everything(client)] == ["PAUSED"]
        assert await service.resume_sandbox("chosen")
        assert await service.delete_sandbox("chosen")
        assert everything(client) == []
        await service.start_sandbox()
    assert everything(client) == [], "they end with the service"
