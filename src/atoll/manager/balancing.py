"""Lets engines share the processors between accounts, again and again."""

from __future__ import annotations

import asyncio
import logging

from atoll.engines.base import Balancing
from atoll.errors import SandboxError
from atoll.manager.core import Core

_EVERY_S = 0.5
_log = logging.getLogger(__name__)


async def balance(core: Core) -> None:
    """Never returns."""
    while True:
        await asyncio.sleep(_EVERY_S)
        if not any(member.record.owner for member in core.members):
            continue  # a program of one user: nobody to share with
        for engine in core.engines:
            if isinstance(engine, Balancing) and engine.name in core.engines.used:
                try:
                    await engine.balance()
                except (SandboxError, OSError) as error:
                    _log.warning("engine '%s' cannot share the processors: %s", engine.name, error)
