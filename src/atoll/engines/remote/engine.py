"""The engine `remote`: sandboxes of an Atoll server, used like those of any other engine.

The life cycle goes over REST, the byte stream over a WebSocket. On the server the sandbox has another id, and its id
here is its name there. So the sandbox can be found even if the answer was lost. A label with the id of this
installation distinguishes its sandboxes from those that others created with the same key.
"""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from atoll.cancellation import finish
from atoll.engines.contract import ByteStream, EngineDescription
from atoll.engines.enforcement import given_limits, refuse_unchangeable
from atoll.engines.engine_traces import traced_engine
from atoll.engines.limit_events import LimitEvents
from atoll.engines.remote.remote_events import RemoteEvents
from atoll.engines.remote.remote_states import (
    ID_MARK,
    MARK,
    RemoteStates,
    effective_details,
    handle_of,
    id_of,
    labels_of,
    listed,
)
from atoll.engines.remote.remote_volumes import RemoteVolumes, name_there
from atoll.engines.remote.rest_client import Server, seconds_since_1970
from atoll.engines.remote.tunnel import Tunnels
from atoll.errors import (
    EngineError,
    EngineUnavailableError,
    SandboxError,
    SandboxGoneError,
    SandboxNotFoundError,
    SpecError,
)
from atoll.model import (
    MANAGER_LABEL,
    NAME_LABEL,
    Capability,
    Cause,
    Handle,
    Limits,
    ListedSandbox,
    Observation,
    SandboxSpec,
    State,
    Stats,
    manus_names,
)
from atoll.model.network_policy import NetworkPolicy
from atoll.model.spec import unnamed
from atoll.model.state import Availability
from atoll.network.refusals import Refusal
from atoll.settings import Settings
from atoll.signature import SignatureError

_AT_ONCE = 16
_UNDO_S = 60.0


@traced_engine
class RemoteEngine(RemoteStates, RemoteVolumes):
    name = "remote"
    sets_up: Literal[True] = True

    def __init__(
        self,
        settings: Settings,
        *,
        url: str | None = None,
        api_key: str | None = None,
        resource_factor: float = 1.0,
        start_timeout: float = 120.0,
        polling_interval: float = 15.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        found = url or environ.get("ATOLL_URL")
        if not found:
            raise EngineUnavailableError("no server is named", hint="Set ATOLL_URL, or give server='http://…'.")
        if not found.startswith(("http://", "https://")):
            raise EngineUnavailableError(f"'{found}' is not the URL of a server", hint="Write http://HOST:PORT.")
        if not resource_factor > 0:
            raise ValueError(f"the resource factor must be more than 0, not {resource_factor!r}")
        if not polling_interval > 0:
            raise ValueError(f"the polling interval must be more than 0 s, not {polling_interval!r}")
        self._polling_interval = polling_interval
        self._description: EngineDescription | None = None
        self._receive_at: str | None = None
        self._events: RemoteEvents | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ours: dict[str, str] = {}
        """The ids of sandboxes here, by those on the server."""
        self._settings = settings
        self._factor = resource_factor
        self._start_timeout = start_timeout
        self._server = Server(found, api_key or environ.get("ATOLL_API_KEY", ""), start_timeout)
        self._tunnels = Tunnels(self._server.url, self._server.headers)

    @classmethod
    def probe(cls, settings: Settings, *, thorough: bool) -> Availability:
        try:
            engine = cls(settings)
            version = engine._server.ask("/info")["version"] if thorough else None
        except SandboxError as error:
            return Availability(cls.name, False, (error.reason,), (error.hint,) if error.hint else ())
        return Availability(cls.name, True, (f"the server {engine._server.url}",), version=version)

    async def describe(self) -> EngineDescription:
        """Describe the server's engine. The server is asked once."""
        if self._description is None:
            info = await self._server.call("GET", "/info")
            known = {capability.value: capability for capability in Capability}
            found = frozenset(known[name] for name in info["capabilities"] if name in known)
            changeable = frozenset(map(str, info.get("changeable_limits") or ()))
            self._description = EngineDescription(
                found, info.get("isolation"), info.get("version"), changeable_limits=changeable
            )
        return self._description

    # --- life -----------------------------------------------------------------------------------------------------

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        making = asyncio.create_task(self._post(sandbox_id, spec))
        try:
            info = await asyncio.shield(making)
        except asyncio.CancelledError:
            # The server continues even if nobody waits for its answer, so the sandbox is awaited and deleted.
            await self._undo(making)
            raise
        return self._handle(info, sandbox_id, spec)

    async def delete(self, handle: Handle) -> None:
        try:
            remote_id = await self._remote_id(handle)
            self._ours.pop(remote_id, None)
            await self._server.call("DELETE", f"/sandboxes/{remote_id}")
        except (SandboxNotFoundError, SandboxGoneError):
            return

    async def pause(self, handle: Handle) -> None:
        await self._server.call("POST", f"/sandboxes/{await self._remote_id(handle)}/pause")

    async def resume(self, handle: Handle) -> None:
        await self._server.call("POST", f"/sandboxes/{await self._remote_id(handle)}/resume")

    async def keep_alive(self, handle: Handle, seconds: float) -> None:
        path = f"/sandboxes/{await self._remote_id(handle)}/keep-alive"
        await self._server.call("POST", path, json={"seconds": seconds})

    async def aclose(self) -> None:
        if self._watching is not None and self._watching.get_loop() is asyncio.get_running_loop():
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._tunnels.aclose()
        await self._server.aclose()

    @property
    def server(self) -> Server:
        """The server, for parts of its API that no engine has."""
        return self._server

    # --- webhooks ---------------------------------------------------------------------------------------------------

    def receive_at(self, url: str) -> None:
        self._receive_at = url

    def announce(self, on_change: Callable[[str], None]) -> None:
        def changed(remote_id: str) -> None:
            if remote_id in self._ours:
                on_change(self._ours[remote_id])

        self._events = RemoteEvents(self._server, changed, self._polling_interval, self._receive_at)
        self._watching = asyncio.create_task(self._events.run(), name="what happens on the server")

    def receive(self, signature: str, body: bytes) -> str | None:
        if self._events is None:
            raise SignatureError("no messages were requested")
        return self._events.receive(signature, body)

    # --- queries ----------------------------------------------------------------------------------------------------

    async def connect(self, handle: Handle) -> ByteStream:
        try:
            return await self._tunnels.open(await self._remote_id(handle))
        except SandboxNotFoundError as error:
            raise SandboxGoneError(error.reason, cause=Cause.USER) from error

    async def inspect(self, handle: Handle) -> Observation:
        try:
            info = await self._server.call("GET", f"/sandboxes/{await self._remote_id(handle)}")
        except SandboxNotFoundError as error:
            return Observation(State.MISSING, reason=error.reason)
        except SandboxGoneError as error:
            return Observation(State.MISSING, _cause(error.cause), error.reason)
        wakes = info.get("paused_by") in ("idle", "room")
        return Observation(State(info["state"]), _cause(info["cause"]), str(info["reason"]), wakes)

    async def list(self) -> list[Handle]:
        found = await self._search(label=f"{MARK}={self._settings.installation_id()}")
        slots = asyncio.Semaphore(_AT_ONCE)

        async def whole(info: dict[str, Any]) -> Handle | None:
            async with slots:
                try:
                    settings = await self._server.call("GET", f"/sandboxes/{info['id']}/settings")
                except (SandboxNotFoundError, SandboxGoneError):
                    return None  # it ended after it was listed
            return self._handle(info, id_of(info), SandboxSpec.of(**settings, labels=labels_of(info)))

        handles = await asyncio.gather(*(whole(info) for info in found))
        return [handle for handle in handles if handle is not None]

    async def listing(self) -> Sequence[ListedSandbox]:
        return [listed(info) for info in await self._search()]

    async def find(self, sandbox_id: str) -> Handle | None:
        """Find a sandbox of the caller on the server, by its name or its id here or there, whichever program created
        it."""
        try:
            info = await self._first(name=sandbox_id) or await self._there(sandbox_id)
            info = info or await self._first(label=f"{ID_MARK}={sandbox_id}")
            if info is None:
                return None
            settings = await self._server.call("GET", f"/sandboxes/{info['id']}/settings")
        except (SandboxNotFoundError, SandboxGoneError, SpecError):
            return None
        known = sandbox_id if sandbox_id == info["id"] else id_of(info)
        return self._handle(info, known, SandboxSpec.of(**settings, labels=labels_of(info)))

    async def _there(self, remote_id: str) -> dict[str, Any] | None:
        try:
            return dict(await self._server.call("GET", f"/sandboxes/{remote_id}"))
        except (SandboxNotFoundError, SandboxGoneError):
            return None

    async def stats(self, handle: Handle) -> Stats:
        try:
            used = await self._server.call("GET", f"/sandboxes/{await self._remote_id(handle)}/stats")
        except (SandboxNotFoundError, SandboxGoneError):
            return Stats()
        return Stats(used["memory_bytes"], used["cpu_s"], used["pids"], used["disk_bytes"])

    async def limit_events(self, handle: Handle, *, killed: bool = False) -> LimitEvents:
        """Return the counters of a sandbox whose spec has limits. Others have none, to save a request around each
        command."""
        asked = handle.spec.limits
        if asked.memory_bytes is None and asked.pids is None and asked.disk_bytes is None:
            return LimitEvents()
        try:
            used = await self._server.call("GET", f"/sandboxes/{await self._remote_id(handle)}/stats")
        except (SandboxNotFoundError, SandboxGoneError):
            return LimitEvents()
        return LimitEvents(used["oom_kills"] or 0, used["pids_refused"] or 0, bool(used["disk_full"]))

    # --- ports ----------------------------------------------------------------------------------------------------

    async def expose_port(self, handle: Handle, name: str, port: int) -> None:
        path = f"/sandboxes/{await self._remote_id(handle)}/ports"
        await self._server.call("POST", path, json={"name": name, "port": port})

    async def port_link(self, handle: Handle, port: int, lifetime_s: float) -> str:
        path = f"/sandboxes/{await self._remote_id(handle)}/port-links"
        body = {"port": port, "lifetime_s": int(lifetime_s), "expose": True}
        made = await self._server.call("POST", path, json=body)
        return str(made["host_url"] or made["url"])

    # --- limits ---------------------------------------------------------------------------------------------------

    async def set_limits(self, handle: Handle, limits: Limits) -> Handle:
        refuse_unchangeable(self.name, (await self.describe()).changeable_limits, limits)
        scaled = self._scaled(given_limits(limits))
        path = f"/sandboxes/{await self._remote_id(handle)}/limits"
        found = await self._server.call("PATCH", path, json=scaled)
        asked = handle.spec.limits.model_copy(update=given_limits(limits))
        details = handle.details | effective_details(found)
        return dataclasses.replace(handle, spec=handle.spec.model_copy(update={"limits": asked}), details=details)

    def _scaled(self, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Return limits with memory and CPUs multiplied by the resource factor."""
        factors = {"memory_bytes": self._factor, "cpus": self._factor}
        return {
            name: type(value)(value * factors[name]) if name in factors and value is not None else value
            for name, value in limits.items()
        }

    # --- network --------------------------------------------------------------------------------------------------

    async def set_network(self, handle: Handle, policy: NetworkPolicy) -> None:
        plain = handle.spec.model_copy(update={"network": policy}).model_dump(mode="json", include={"network"})
        path = f"/sandboxes/{await self._remote_id(handle)}/network"
        await self._server.call("PUT", path, json={"policy": plain["network"]})

    async def refusals(self, handle: Handle) -> Sequence[Refusal]:
        found = await self._server.call("GET", f"/sandboxes/{await self._remote_id(handle)}/network")
        known = {field.name for field in dataclasses.fields(Refusal)}
        listed = [{name: each[name] for name in known & each.keys()} for each in found["refusals"]]
        return [Refusal(**{**each, "time": seconds_since_1970(each["time"])}) for each in listed]

    async def items(self, path: str, **params: str) -> Sequence[Any]:
        """Return all items of one of the server's lists, page by page."""
        return await self._server.items(path, params)

    async def call(self, method: str, path: str, **options: Any) -> Any:
        """Call a part of the server's API that no engine has: its catalogue, keys or events."""
        return await self._server.call(method, path, **options)

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _post(self, sandbox_id: str, spec: SandboxSpec) -> dict[str, Any]:
        settings = spec.model_dump(mode="json", exclude={"labels": True, "account": True, **unnamed(spec)})
        for volume in settings["volumes"]:
            if volume.get("name"):
                volume["name"] = name_there(volume["name"], spec.owner)
        patience_s = self._start_timeout
        if spec.setup:
            patience_s += spec.setup_timeout_s
        else:  # servers without setup commands accept everything else
            del settings["setup"], settings["setup_timeout_s"]
        for newer in ("start", "ready", "sudo", "prewarm"):
            if getattr(spec, newer) is None:
                del settings[newer]
        patience_s += spec.ready.timeout_s if spec.ready else 0.0
        for option in ("work_dir", "user"):  # servers of earlier versions know no default of the image
            if settings[option] is None:
                del settings[option]
        settings["limits"] = self._scaled(settings["limits"])
        labels = dict(spec.labels)
        # A manager has names for each of its owners, which mean nothing on another server.
        name = labels.pop(NAME_LABEL, None) if MANAGER_LABEL not in labels else None
        marks = {ID_MARK: sandbox_id} if name is not None else {}
        body = {"name": name or sandbox_id, "settings": settings, "labels": {**self._marked(labels), **marks}}
        if manus_names.is_plain(task := spec.labels.get(manus_names.TASK_LABEL, "")):
            body["task_id"] = task
        info = await self._server.call(
            "POST", "/sandboxes", key=f"create-{secrets.token_hex(16)}", json=body, timeout_s=patience_s
        )
        if not isinstance(info, dict):
            raise EngineError("the server's answer is invalid")
        return info

    async def _undo(self, making: asyncio.Task[Any]) -> None:
        """Delete the sandboxes that `making` creates."""

        async def undo() -> None:
            await asyncio.wait({making})
            if not making.cancelled() and making.exception() is None:
                made = making.result()
                for info in made if isinstance(made, list) else [made]:
                    await self._server.call("DELETE", f"/sandboxes/{info['id']}")

        undoing = asyncio.create_task(undo())
        await finish(asyncio.wait({undoing}, timeout=_UNDO_S))

    def _handle(self, info: Mapping[str, Any], sandbox_id: str, spec: SandboxSpec) -> Handle:
        self._ours[str(info["id"])] = sandbox_id
        return handle_of(info, sandbox_id, spec)

    async def _remote_id(self, handle: Handle) -> str:
        known = handle.details.get("remote_id")
        if known is not None:
            self._ours[known] = handle.sandbox_id
            return known
        id = handle.sandbox_id
        found = await self._first(name=id) or await self._first(label=f"{ID_MARK}={id}")
        if found is None:
            raise SandboxNotFoundError(f"Sandbox {id} not found")
        return str(found["id"])

    async def _first(self, **query: str) -> dict[str, Any] | None:
        """Return a sandbox of the caller that matches."""
        page = await self._server.call("GET", "/sandboxes/search", params={**query, "limit": "1"})
        return dict(page["items"][0]) if page["items"] else None

    async def _search(self, **query: str) -> builtins.list[dict[str, Any]]:
        """Return all sandboxes of the caller that match."""
        found: builtins.list[dict[str, Any]] = []
        query["limit"] = "100"
        while True:
            page = await self._server.call("GET", "/sandboxes/search", params=query)
            found += page["items"]
            if page["next_page_id"] is None:
                return found
            query["page_id"] = page["next_page_id"]


def _cause(text: object) -> Cause | None:
    return Cause(text) if text in {cause.value for cause in Cause} else None
