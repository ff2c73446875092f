"""Commands with hardly any time."""

from __future__ import annotations

import pytest

from atoll import AsyncSandbox, Cause, SandboxTimeoutError
from atoll.guest.guest import Guest


async def test_a_command_without_time_to_connect_has_run_out_of_time(sandbox: AsyncSandbox) -> None:
    """The sandbox is not to blame, whether or not there is a connection already."""
    guest = Guest(sandbox.access.connect)
    await guest.present(5e-324)
    await guest.aclose()
    for _ in range(2):
        assert (await sandbox.exec("sleep 100", timeout=5e-324)).cause is Cause.TIMEOUT
        with pytest.raises(SandboxTimeoutError):
            await sandbox.run_command("sleep 100", 5e-324)
    assert await sandbox.run_command("echo here") == "here"
