"""Containers by name: the calls of the Docker API that Atoll needs, with its refusals as Atoll's errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from atoll.engines.docker.api.http import QUICK_S, SLOW_S, Http, RefusedError
from atoll.errors import EngineError
from atoll.printable import printable

_REMOVE_S = 60.0
_AGAIN_S = 0.05
_EVENT_S = 0.5

Json = dict[str, Any]


class Containers:
    """The containers of a Docker engine. Methods raise EngineError and EngineUnavailableError; `make`, `start`,
    `switch` and `update` raise RefusedError as well."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def make(self, name: str, body: Json) -> None:
        await self._http.call("POST", "/containers/create", query={"name": name}, body=body, timeout_s=SLOW_S)

    async def start(self, name: str) -> None:
        await self._http.call("POST", f"/containers/{name}/start", timeout_s=SLOW_S)

    async def switch(self, name: str, verb: str) -> None:
        """Pause or unpause a container. `verb` is `pause` or `unpause`."""
        await self._http.call("POST", f"/containers/{name}/{verb}", timeout_s=SLOW_S)

    async def update(self, name: str, options: Json) -> None:
        """Change limits of a container: all or none."""
        await self._http.call("POST", f"/containers/{name}/update", body=options, timeout_s=SLOW_S)

    async def inspect(self, name: str) -> Json | None:
        """Return the description of a container; None if there is none."""
        try:
            found = await self._http.call("GET", f"/containers/{name}/json")
        except RefusedError as error:
            if error.status == 404:
                return None
            raise EngineError(f"the Docker engine cannot inspect a container: {error.message}") from error
        return found if isinstance(found, dict) else None

    async def labelled(self, label: str) -> list[Json]:
        query = {"all": "1", "filters": json.dumps({"label": [label]})}
        try:
            found = await self._http.call("GET", "/containers/json", query=query, timeout_s=SLOW_S)
        except RefusedError as error:
            raise EngineError(f"the Docker engine cannot list its containers: {error.message}") from error
        return list(found)

    async def stats(self, name: str) -> Json | None:
        """Return the statistics of a container; None if it does not run."""
        try:
            query = {"stream": "0", "one-shot": "1"}
            found = await self._http.call("GET", f"/containers/{name}/stats", query=query, timeout_s=SLOW_S)
        except RefusedError as error:
            if error.status in (404, 409):
                return None
            raise EngineError(f"the Docker engine cannot report statistics: {error.message}") from error
        return found if isinstance(found, dict) else None

    async def written_bytes(self, name: str) -> int:
        """Return how much a container has written over its image. The Docker engine looks at every file for that."""
        try:
            found = await self._http.call("GET", f"/containers/{name}/json", query={"size": "1"}, timeout_s=SLOW_S)
        except RefusedError as error:
            raise EngineError(f"the Docker engine cannot inspect a container: {error.message}") from error
        return int(found.get("SizeRw") or 0)

    async def remove(self, name: str) -> None:
        """Kill and remove a container, with the anonymous volumes that its image declares. May be repeated."""
        deadline = time.monotonic() + _REMOVE_S
        while True:
            try:
                query = {"force": "1", "v": "1"}
                await self._http.call("DELETE", f"/containers/{name}", query=query, timeout_s=SLOW_S)
                return
            except RefusedError as error:
                if error.status == 404:
                    return
                # 409: another request is removing it. 500: its disk is still in use for a moment.
                if error.status not in (409, 500) or time.monotonic() > deadline:
                    raise EngineError(
                        f"container '{name}' cannot be removed: {error.message}", hint="Delete it again later."
                    ) from error
            await asyncio.sleep(_AGAIN_S)

    async def last_words(self, name: str) -> str:
        """Return the last lines that its first process wrote to its log, as one line."""
        try:
            query = {"stderr": "1", "stdout": "1", "tail": "5"}
            said = await self._http.raw("GET", f"/containers/{name}/logs", query=query)
        except RefusedError:
            return ""
        return printable(said, 300, instead=" ")

    async def ran_out_of_memory(self, name: str, since: float) -> bool:
        """Return whether anything in a container was killed for its memory limit since that moment."""
        async with aclosing(self._memory_events(name, since, wait=True)) as told:
            return await anext(told, None) is not None

    async def oom_kills(self, name: str, since: float, *, wait: bool) -> int:
        """Count the kills for the memory limit that the Docker engine remembers. `wait` includes those it learns of a
        little later."""
        async with aclosing(self._memory_events(name, since, wait=wait)) as told:
            return len([None async for _ in told])

    async def _memory_events(self, name: str, since: float, *, wait: bool) -> AsyncGenerator[Json, None]:
        filters = json.dumps({"type": ["container"], "container": [name], "event": ["oom"]})
        # The engine learns of a kill a moment after the process that waits for the killed one.
        until = time.time() + (_EVENT_S if wait else 0.0)
        query = {"since": f"{since:.9f}", "until": f"{until:.9f}", "filters": filters}
        lines = self._http.lines("GET", "/events", query=query, headers={}, timeout_s=QUICK_S)
        with suppress(RefusedError):
            async with aclosing(lines) as told:
                async for event in told:
                    yield event
