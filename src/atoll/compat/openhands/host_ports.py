"""The exposed ports of sandboxes as ports of this machine, open while their sandbox runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from urllib.parse import quote

from atoll.compat.openhands.values import AGENT_SERVER, VSCODE, ExposedPort, ExposedUrl
from atoll.errors import SandboxError
from atoll.guest.port_streams import http_status
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.sandbox.port_forward import AsyncForward

_HEALTH_S = 2.0


class Ports:
    def __init__(self, ports: Sequence[ExposedPort], pattern: str, host: str, vscode_port: int | None) -> None:
        if "{port}" not in pattern:
            raise ValueError(f"a URL pattern must contain {{port}}, unlike {pattern!r}")
        self._ports = ports
        self._pattern = pattern
        self._host = host
        self._vscode_port = vscode_port
        self._open: dict[str, dict[str, AsyncForward]] = {}
        self._opening = asyncio.Lock()

    async def urls(
        self, sandbox: ManagedSandbox, key: str, runs: Callable[[], Awaitable[bool]]
    ) -> list[ExposedUrl] | None:
        """Return the URLs of a sandbox; None if it does not run any more. Whoever ends or pauses it calls `close`
        afterwards."""
        async with self._opening:
            if sandbox.id not in self._open:
                if not await runs():
                    return None
                self._open[sandbox.id] = await self._forwards(sandbox)
            forwards = self._open[sandbox.id]
        found: list[ExposedUrl] = []
        for port in self._ports:
            url = self._pattern.format(port=forwards[port.name].address[1])
            if port.name == VSCODE:
                url = f"{url.rstrip('/')}/?tkn={quote(key, safe='')}&folder={quote(sandbox.spec.directory, safe='')}"
            found.append(ExposedUrl(name=port.name, url=url, port=port.container_port))
        return found

    async def is_well(self, sandbox: ManagedSandbox, path: str) -> bool:
        """Return whether the agent server reports that it is healthy; True if none is exposed."""
        port = next((each.container_port for each in self._ports if each.name == AGENT_SERVER), None)
        if port is None:
            return True
        try:
            async with asyncio.timeout(_HEALTH_S), await sandbox.connect_port(port) as stream:
                return await http_status(stream, port, f"/{path.lstrip('/')}") == 200
        except (OSError, SandboxError):  # a timeout is an OSError too
            return False

    async def close(self, sandbox_id: str) -> None:
        async with self._opening:
            for forward in self._open.pop(sandbox_id, {}).values():
                await forward.aclose()

    async def close_all(self) -> None:
        for sandbox_id in list(self._open):
            await self.close(sandbox_id)

    async def _forwards(self, sandbox: ManagedSandbox) -> dict[str, AsyncForward]:
        async with AsyncExitStack() as opened:
            forwards = {
                port.name: await opened.enter_async_context(
                    await sandbox.expose(port.container_port, self._local_port(port), host=self._host)
                )
                for port in self._ports
            }
            opened.pop_all()
            return forwards

    def _local_port(self, port: ExposedPort) -> int:
        """Return the local port of an exposed port. The first sandbox with an editor gets the port chosen for
        editors."""
        wanted = self._vscode_port if port.name == VSCODE else None
        taken = {forward.address[1] for each in self._open.values() for forward in each.values()}
        return wanted if wanted is not None and wanted not in taken else 0
