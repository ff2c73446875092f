"""A command of the shell that runs out of time while it is still starting what it starts."""

from __future__ import annotations

import asyncio
import random

import pytest

from atoll import AsyncSandbox, SandboxTimeoutError
from atoll.settings import Settings
from sandbox.conftest import ENGINE

_COMMAND = "sh -c \"trap '' TERM INT HUP; setsid sleep {mark} & sleep {mark}\""
_LIST = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done 2>/dev/null"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_whenever_a_command_runs_out_of_time_nothing_of_it_goes_on(settings: Settings) -> None:
    """Once in two hundred times something did, before the shell was at its prompt when it was looked for."""

    async def rounds(number: int) -> None:
        chance = random.Random(number)
        async with AsyncSandbox(engine=ENGINE, settings=settings) as sandbox:
            for mark in range(10_000, 10_300):
                with pytest.raises(SandboxTimeoutError):
                    await sandbox.run_command(_COMMAND.format(mark=mark), 0.002 + chance.random() * 0.1)
                left = [line for line in (await sandbox.exec(_LIST)).stdout.splitlines() if str(mark) in line]
                assert left == []

    await asyncio.gather(*map(rounds, range(4)))
