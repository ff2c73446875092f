"""Prewarming: the memory of a ready sandbox is kept, so that the next ones of its spec start with everything running.

The engine keeps that memory and looks for it when it creates a sandbox. This module says when it may be kept: once the
sandbox is ready, and before anybody gets it.
"""

from __future__ import annotations

import logging

from atoll.engines.checkpointing import Prewarming
from atoll.engines.contract import SetsUp
from atoll.errors import SandboxError
from atoll.sandbox.sandbox_access import SandboxAccess

KEEP_S = 180.0
"""How long it may take to keep the memory."""
_log = logging.getLogger(__name__)


async def keep(access: SandboxAccess) -> None:
    """Keep the memory of a new sandbox that is ready, if its spec says so. If that fails, the sandbox goes on."""
    if access.spec.prewarm is None or access.handle().is_prewarmed:
        return
    engine = await access.engine()
    if isinstance(engine, SetsUp) or not isinstance(engine, Prewarming):
        return
    try:
        if found := await access.outside_connections():
            _log.warning("the memory of sandbox %s was not kept: it is connected to %s", access.sandbox_id, found[0])
            return
        await access.let_go()
        await engine.keep_ready(access.handle())
    except (SandboxError, OSError) as error:
        _log.warning("the memory of sandbox %s was not kept: %s", access.sandbox_id, error)


async def distrust(access: SandboxAccess, error: BaseException) -> None:
    """Keep no longer the memory that a new sandbox started from, if this error kept the sandbox from becoming ready."""
    if not (isinstance(error, SandboxError) and access.exists):
        return
    try:
        engine, handle = await access.engine(), access.handle()
        if handle.is_prewarmed and isinstance(engine, Prewarming):
            await engine.distrust_ready(handle)
    except (SandboxError, OSError) as failure:
        _log.warning("the memory that sandbox %s started from is still kept: %s", access.sandbox_id, failure)
