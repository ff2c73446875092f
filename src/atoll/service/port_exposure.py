"""Expose ports of sandboxes, and create links to exposed ports."""

from __future__ import annotations

from atoll.manager import Record, SandboxManager
from atoll.service import exposed_ports
from atoll.service.caller import Caller
from atoll.service.failures import ForbiddenError
from atoll.service.models.exposed_port import ExposedPort, ExposedUrl
from atoll.service.sandbox_credentials import SandboxCredentials
from atoll.service.sandbox_lookup import SandboxLookup
from atoll.service.sandbox_view import SandboxView


class PortExposure:
    def __init__(
        self,
        manager: SandboxManager,
        lookup: SandboxLookup,
        view: SandboxView,
        credentials: SandboxCredentials,
        urls: exposed_ports.PortUrls,
    ) -> None:
        self._manager = manager
        self._lookup = lookup
        self._view = view
        self._credentials = credentials
        self._urls = urls

    async def need_exposed(self, caller: Caller, sandbox_id: str, port: int) -> None:
        """Raise ForbiddenError for a port that is not exposed."""
        record = await self._lookup.existing(caller, sandbox_id)
        if port not in exposed_ports.numbers_of(record.labels):
            raise ForbiddenError(
                f"port {port} of this sandbox is not exposed", hint="Expose it with `POST /sandboxes/ID/ports`."
            )

    async def expose(self, caller: Caller, sandbox_id: str, port: ExposedPort) -> ExposedUrl:
        """Expose a port of an existing sandbox. A port of the same name is replaced. Commands that are started
        afterwards have the variable `NAME=PORT`."""
        await self._lookup.existing(caller, sandbox_id)

        def change(record: Record) -> dict[str, object]:
            labels = exposed_ports.with_port(record.labels, port)
            variables = exposed_ports.variables_of([port], record.spec.env)
            services = tuple(exposed_ports.numbers_of(labels))
            return {"labels": labels, "services": services, "env": {**record.env, **variables}}

        record = await self._manager.update(sandbox_id, change)
        return next(url for url in self._view.urls(caller, record) if url.name == port.name)

    async def hide(self, caller: Caller, sandbox_id: str, port: int) -> None:
        """Stop exposing a port, under any name. May be repeated."""
        await self._lookup.existing(caller, sandbox_id)

        def change(record: Record) -> dict[str, object]:
            labels = exposed_ports.without_port(record.labels, port)
            return {"labels": labels, "services": tuple(exposed_ports.numbers_of(labels))}

        await self._manager.update(sandbox_id, change)

    async def urls(self, caller: Caller, sandbox_id: str) -> list[ExposedUrl]:
        return self._view.urls(caller, await self._lookup.existing(caller, sandbox_id))

    async def link(self, caller: Caller, sandbox_id: str, port: int, until: int) -> tuple[str, str | None, int]:
        """Return links to an exposed port that need no other credential, by path and, if there is one, by host name,
        and when they expire. They expire no later than the caller's own credential."""
        await self.need_exposed(caller, sandbox_id, port)
        until = until if caller.expires_at is None else min(until, int(caller.expires_at))
        mark = self._credentials.port_link(caller, sandbox_id, port, until)
        host = self._urls.by_host(sandbox_id, port)
        return (
            f"{self._urls.by_path(sandbox_id, port)}~{mark}/",
            f"{host}.atoll/~{mark}/" if host else None,
            until,
        )
