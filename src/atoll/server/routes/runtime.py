"""The runtime API that OpenHands's remote back end speaks, below /runtime, with an API key as `X-API-Key`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from atoll.server.auth import Manager, Reader, Services_
from atoll.service.runtime_models import RuntimeChoice, RuntimeInfo, RuntimeList, RuntimeStart

router = APIRouter(prefix="/runtime", tags=["runtime"])
_Id = Annotated[str, Path(max_length=128)]


@router.post("/start", operation_id="start_runtime")
async def start(caller: Manager, services: Services_, wanted: RuntimeStart) -> RuntimeInfo:
    """Start the sandbox of a session, or find the one that the same request started. Answers when it runs, or with
    `starting` if that takes long."""
    return await services.runtimes.start(caller, wanted)


@router.post("/stop", operation_id="stop_runtime")
async def stop(caller: Manager, services: Services_, wanted: RuntimeChoice) -> RuntimeInfo:
    """Delete a runtime and everything in it."""
    return await services.runtimes.stop(caller, wanted.runtime_id)


@router.post("/pause", operation_id="pause_runtime")
async def pause(caller: Manager, services: Services_, wanted: RuntimeChoice) -> RuntimeInfo:
    """Stop its processes where they are. May be repeated."""
    return await services.runtimes.pause(caller, wanted.runtime_id)


@router.post("/resume", operation_id="resume_runtime")
async def resume(caller: Manager, services: Services_, wanted: RuntimeChoice) -> RuntimeInfo:
    """Let its processes go on."""
    return await services.runtimes.resume(caller, wanted.runtime_id)


@router.get("/list", operation_id="list_runtimes")
async def list_all(caller: Reader, services: Services_) -> RuntimeList:
    """The caller's runtimes that run or are being started, the newest first."""
    return RuntimeList(runtimes=await services.runtimes.running(caller))


@router.get("/sessions/batch", operation_id="batch_get_sessions")
async def batch(
    caller: Reader, services: Services_, ids: Annotated[list[str], Query(min_length=1, max_length=100)]
) -> list[RuntimeInfo | None]:
    """The runtimes of several sessions, in the order asked for; null for what is not there."""
    return await services.runtimes.batch(caller, ids)


@router.get("/sessions/{session_id}", operation_id="get_session")
async def session(caller: Reader, services: Services_, session_id: _Id) -> RuntimeInfo:
    """The runtime of a session, paused or not."""
    return await services.runtimes.get(caller, session_id)


@router.get("/runtime/{runtime_id}", operation_id="get_runtime")
async def runtime(caller: Reader, services: Services_, runtime_id: _Id) -> RuntimeInfo:
    """The same by the id of the runtime, as older releases of OpenHands ask."""
    return await services.runtimes.describe(caller, runtime_id)
