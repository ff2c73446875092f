"""OpenHands's own remote back end at work on an Atoll server, in an environment of its own that has `openhands-ai`.

Its configuration is read from the environment as its server reads it, its database is its own, made by its own
migrations, and its services are injected as its routes get them. What it finds out is printed as one line of JSON.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-any-return, misc"
from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from importlib.metadata import version
from typing import Any

import httpx
from fastapi import FastAPI
from openhands.app_server.config import get_global_config, get_sandbox_service
from openhands.app_server.sandbox import remote_sandbox_service, sandbox_router
from openhands.app_server.sandbox.remote_sandbox_spec_service import RemoteSandboxSpecServiceInjector
from openhands.app_server.sandbox.sandbox_models import SandboxInfo
from openhands.app_server.sandbox.sandbox_spec_models import SandboxSpecInfo
from openhands.app_server.sandbox.session_auth import validate_session_key
from openhands.app_server.services.injector import InjectorState
from openhands.app_server.user.specifiy_user_context import USER_CONTEXT_ATTR, SpecifyUserContext

said: dict[str, Any] = {"version": version("openhands-ai")}


class As:
    """Its sandbox service for one user, as a request would get it."""

    def __init__(self, user_id: str) -> None:
        self._state = InjectorState()
        setattr(self._state, USER_CONTEXT_ATTR, SpecifyUserContext(user_id))

    async def __aenter__(self) -> remote_sandbox_service.RemoteSandboxService:
        self._context = get_sandbox_service(self._state)
        service = await self._context.__aenter__()
        assert type(service) is remote_sandbox_service.RemoteSandboxService
        return service

    async def __aexit__(self, *error: Any) -> None:
        await self._context.__aexit__(*error)


def shown(info: SandboxInfo | None) -> Any:
    return None if info is None else json.loads(info.model_dump_json())


async def fetch(url: str, key: str | None) -> list[Any]:
    """What the program in the sandbox answers there, as soon as it listens."""
    headers = {"X-Session-API-Key": key} if key else {}
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        for _ in range(500):
            answer = await client.get(url, headers=headers)
            if answer.status_code != 502:
                break
            await asyncio.sleep(0.02)
        return [answer.status_code, json.loads(answer.text)]


async def live() -> None:
    """Start, search, batch, session key, exposed URLs, pause, resume."""
    async with As("alice") as service:
        first, chosen = await service.start_sandbox(), await service.start_sandbox("host", "chosen-by-alice")
        said["started"] = [shown(first), shown(chosen)]
    async with As("alice") as service:
        said["running"] = shown(await service.wait_for_sandbox_running(first.id, 30, 1, service.httpx_client))
        page = await service.search_sandboxes(limit=1)
        rest = await service.search_sandboxes(page_id=page.next_page_id, limit=1)
        said["search"] = [shown(each) for each in (*page.items, *rest.items)]
        said["batch"] = [shown(each) for each in await service.batch_get_sandboxes([first.id, "none", chosen.id])]
    async with As("bob") as service:
        said["others"] = [shown(await service.get_sandbox(first.id)), await service.delete_sandbox(first.id)]
    key = said["running"]["session_api_key"]
    async with As("alice") as service:
        said["by key"] = [
            shown(await service.get_sandbox_by_session_api_key(each)) for each in (key, f"{key[:-1]}x", "")
        ]
    said["validated"] = shown(await validate_session_key(key))
    said["urls"] = {each["name"]: await fetch(each["url"], key) for each in said["running"]["exposed_urls"]}
    said["without key"] = await fetch(f"{said['running']['exposed_urls'][0]['url']}/api", None)
    async with As("alice") as service:
        said["paused"] = [await service.pause_sandbox(first.id), await service.pause_sandbox("none")]
        said["while paused"] = shown(await service.get_sandbox(first.id))
    try:
        said["key while paused"] = shown(await validate_session_key(key))
    except Exception as error:  # whatever it is, it is a refusal
        said["key while paused"] = str(getattr(error, "status_code", error))
    async with As("alice") as service:
        said["resumed"] = [await service.resume_sandbox(first.id), await service.resume_sandbox("none")]
        said["after"] = shown(await service.get_sandbox(first.id))
    said["by key after"] = shown(await validate_session_key(key))
    said["url after"] = await fetch(f"{said['after']['exposed_urls'][0]['url']}/api", key)


async def cap() -> None:
    """The oldest is paused where there are too many."""
    async with As("alice") as service:
        service.max_num_sandboxes = 2
        third = await service.start_sandbox("host")
        said["third"] = third.id
    async with As("alice") as service:
        said["at the cap"] = {each.id: each.status.value for each in (await service.search_sandboxes()).items}


async def routes() -> None:
    """Its own REST routes over its own service, as its front end calls them."""
    app = FastAPI()
    app.include_router(sandbox_router.router, prefix="/api/v1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://openhands", timeout=30) as client:
        made = (await client.post("/api/v1/sandboxes")).json()
        place = f"/api/v1/sandboxes/{made['id']}"
        said["by its routes"] = {
            "start": made,
            "batch": (await client.get("/api/v1/sandboxes", params={"id": [made["id"], "none"]})).json(),
            "pause": (await client.post(f"{place}/pause", json={})).json(),
            "resume": (await client.post(f"{place}/resume", json={})).json(),
            # Its route takes the id from the query, whatever the path says.
            "delete": (await client.delete(place, params={"sandbox_id": made["id"]})).status_code,
            "again": (await client.delete(place, params={"sandbox_id": made["id"]})).status_code,
        }


async def failures_and_end() -> None:
    """What cannot be started can be deleted all the same; nothing is left."""
    async with As("alice") as service:
        try:
            said["no image"] = shown(await service.start_sandbox("no-such:1"))
        except Exception as error:
            said["no image"] = f"{type(error).__name__}: {error}"
    async with As("alice") as service:
        ids = [each.id for each in (await service.search_sandboxes()).items]
        said["deleted"] = [await service.delete_sandbox(each) for each in ids]
    async with As("alice") as service:
        said["left"] = [each.id for each in (await service.search_sandboxes()).items]


async def polled() -> None:
    """One round of its poller, which reads /list and then asks agent servers for conversations."""
    failures: list[str] = []
    told = logging.Handler(logging.ERROR)
    told.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(remote_sandbox_service.__name__).addHandler(told)
    task = asyncio.create_task(
        remote_sandbox_service.poll_agent_servers(
            os.environ["SANDBOX_REMOTE_RUNTIME_API_URL"], os.environ["SANDBOX_API_KEY"], 1000
        )
    )
    await asyncio.sleep(1)  # it tells nobody when a round is over
    said["poller"] = [task.done(), list(failures)]
    task.cancel()


async def with_agent_server() -> None:
    """Its own agent server, behind the URL that it got."""
    async with As("alice") as service:
        made = await service.start_sandbox("agent")
    async with As("alice") as service:
        info = await service.wait_for_sandbox_running(made.id, 150, 1, service.httpx_client)
    assert info.exposed_urls is not None
    url = f"{info.exposed_urls[0].url}/api/conversations/search"
    said["agent"] = shown(info)
    said["conversations"] = [await fetch(url, key) for key in (None, "wrong", info.session_api_key)]
    async with As("alice") as service:
        said["again"] = [await service.pause_sandbox(info.id), await service.resume_sandbox(info.id)]
    said["conversations after"] = await fetch(url, info.session_api_key)
    async with As("alice") as service:
        said["deleted"] = await service.delete_sandbox(info.id)


async def main() -> None:
    """With one argument, the command of its specs, everything but the agent server; without, that."""
    command: list[str] | None = json.loads(sys.argv[1]) if sys.argv[1:] else None
    config = get_global_config()
    assert config.lifespan is not None
    config.lifespan.run_alembic()
    names = ("host", "no-such:1", "agent")
    specs = [SandboxSpecInfo(id=name, command=command, initial_env={"MINE": "yes"}) for name in names]
    config.sandbox_spec = RemoteSandboxSpecServiceInjector(specs=specs)
    for part in (live, cap, polled, routes, failures_and_end) if command is not None else (with_agent_server,):
        await part()
    print("SAID " + json.dumps(said))


asyncio.run(main())
