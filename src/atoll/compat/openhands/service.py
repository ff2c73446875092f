"""The interfaces of OpenHands's services: sandboxes of one user, and the read-only catalogue of specs."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from atoll.compat.openhands.values import (
    AGENT_SERVER,
    SandboxInfo,
    SandboxPage,
    SandboxSpecInfo,
    SandboxSpecInfoPage,
    SandboxStatus,
)
from atoll.errors import SandboxError

if TYPE_CHECKING:
    import httpx

_ALIVE_S = 5.0


class SandboxService(ABC):
    @abstractmethod
    async def search_sandboxes(self, page_id: str | None = None, limit: int = 100) -> SandboxPage:
        """List the user's sandboxes, newest first."""

    @abstractmethod
    async def get_sandbox(self, sandbox_id: str) -> SandboxInfo | None:
        """Return a sandbox; None if there is none."""

    @abstractmethod
    async def get_sandbox_by_session_api_key(self, session_api_key: str) -> SandboxInfo | None:
        """Return the running sandbox that has this key; None if there is none."""

    @abstractmethod
    async def start_sandbox(
        self,
        sandbox_spec_id: str | None = None,
        sandbox_id: str | None = None,
        extra_env: dict[str, str] | None = None,
    ) -> SandboxInfo:
        """Start a sandbox from that spec, or from the default one, under the given id or a new one."""

    @abstractmethod
    async def resume_sandbox(self, sandbox_id: str) -> bool:
        """Resume a sandbox. Returns False if there is none, True also if it already runs."""

    @abstractmethod
    async def pause_sandbox(self, sandbox_id: str) -> bool:
        """Pause a sandbox. Returns False if there is none, True also if it is already paused."""

    @abstractmethod
    async def delete_sandbox(self, sandbox_id: str) -> bool:
        """Delete a sandbox. Returns False if there is none."""

    async def aclose(self) -> None:  # noqa: B027
        """Release everything that the service holds. May be repeated."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def batch_get_sandboxes(self, sandbox_ids: list[str]) -> list[SandboxInfo | None]:
        """Return sandboxes in the given order; None for those that do not exist."""
        return await asyncio.gather(*(self.get_sandbox(sandbox_id) for sandbox_id in sandbox_ids))

    async def pause_old_sandboxes(self, max_num_sandboxes: int) -> list[str]:
        """Pause the oldest running sandboxes until `max_num_sandboxes` are left. Returns the ids of the paused ones."""
        if max_num_sandboxes <= 0:
            raise ValueError("max_num_sandboxes must be greater than 0")
        return await self._pause_down_to(max_num_sandboxes)

    async def wait_for_sandbox_running(
        self,
        sandbox_id: str,
        timeout: float = 120,
        poll_interval: float = 2,
        httpx_client: httpx.AsyncClient | None = None,
    ) -> SandboxInfo:
        """Wait until a sandbox runs; with a client, also until its agent server answers at /alive. Raises SandboxError
        if it fails or takes longer."""
        deadline = time.monotonic() + timeout
        while True:
            found = await self.get_sandbox(sandbox_id)
            if found is None:
                raise SandboxError(f"Sandbox not found: {sandbox_id}")
            if found.status is SandboxStatus.ERROR:
                raise SandboxError(f"Sandbox entered error state: {sandbox_id}: {found.status_detail or 'unknown'}")
            if found.status is SandboxStatus.RUNNING and (httpx_client is None or await _alive(found, httpx_client)):
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise SandboxError(f"Sandbox failed to start within {timeout:g}s: {sandbox_id}")
            await asyncio.sleep(min(poll_interval, left))

    async def _pause_down_to(self, most: int) -> list[str]:
        running: list[SandboxInfo] = []
        page = SandboxPage(items=[], next_page_id="0")
        while page.next_page_id is not None:
            page = await self.search_sandboxes(page_id=page.next_page_id, limit=100)
            running += [info for info in page.items if info.status is SandboxStatus.RUNNING]
        paused: list[str] = []
        for info in sorted(running, key=lambda info: info.created_at):
            if len(running) - len(paused) <= most:
                break
            try:
                if await self.pause_sandbox(info.id):
                    paused.append(info.id)
            except SandboxError:
                continue  # then the next oldest is paused
        return paused


class SandboxSpecService(ABC):
    @abstractmethod
    async def search_sandbox_specs(self, page_id: str | None = None, limit: int = 100) -> SandboxSpecInfoPage:
        """List the specs. `page_id` is the end of the previous page."""

    @abstractmethod
    async def get_sandbox_spec(self, sandbox_spec_id: str) -> SandboxSpecInfo | None: ...

    async def get_default_sandbox_spec(self) -> SandboxSpecInfo:
        """Return the first spec. Raises SandboxError if there is none."""
        page = await self.search_sandbox_specs(limit=1)
        if not page.items:
            raise SandboxError("No sandbox specs available!")
        return page.items[0]

    async def batch_get_sandbox_specs(self, sandbox_spec_ids: list[str]) -> list[SandboxSpecInfo | None]:
        """Return specs in the given order; None for those that do not exist."""
        return await asyncio.gather(*(self.get_sandbox_spec(spec_id) for spec_id in sandbox_spec_ids))


class PresetSandboxSpecService(SandboxSpecService):
    """A fixed list of specs."""

    def __init__(self, specs: Sequence[SandboxSpecInfo]) -> None:
        self.specs = list(specs)

    async def search_sandbox_specs(self, page_id: str | None = None, limit: int = 100) -> SandboxSpecInfoPage:
        first = offset(page_id)
        more = str(first + limit) if len(self.specs) > first + limit else None
        return SandboxSpecInfoPage(items=self.specs[first : first + limit], next_page_id=more)

    async def get_sandbox_spec(self, sandbox_spec_id: str) -> SandboxSpecInfo | None:
        return next((spec for spec in self.specs if spec.id == sandbox_spec_id), None)


def offset(page_id: str | None) -> int:
    """Return the start of a page. As in OpenHands, anything that is no number means the beginning."""
    return int(page_id) if page_id is not None and page_id.isdecimal() and len(page_id) < 16 else 0


async def _alive(info: SandboxInfo, client: httpx.AsyncClient) -> bool:
    url = next((each.url for each in info.exposed_urls or () if each.name == AGENT_SERVER), None)
    if url is None:
        return True
    try:
        return (await client.get(f"{url.rstrip('/')}/alive", timeout=_ALIVE_S)).is_success
    except Exception:  # whatever the reason, it does not answer yet
        return False
