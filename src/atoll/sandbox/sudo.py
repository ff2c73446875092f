"""Sudo: users inside who may become root, where the spec allows it.

Set-id files have no effect in a sandbox. So the program `sudo` asks the agent, which is root inside. The host provides
the program and tells the agent who may.
"""

from __future__ import annotations

import contextlib

from atoll import agent_binary, workers
from atoll.errors import UnsupportedError
from atoll.guest.frames import Op, Tag, encode_fields
from atoll.model import Capability
from atoll.sandbox.sandbox_access import SandboxAccess

PROGRAM = "/run/atoll/sudo"
_USERS = ("user",)
"""The accounts inside who may, besides root."""
_LINK, _OWN = "/usr/local/bin/sudo", "/usr/bin/sudo"


async def allow(access: SandboxAccess) -> None:
    """Let the users of a sandbox that was just made use `sudo`, if its spec or its image allows it. May be repeated."""
    if not access.start_plan().sudo:
        return
    engine = await access.engine()
    description = await engine.describe()
    if description.isolation is None or Capability.USERS not in description.capabilities:
        raise UnsupportedError(
            f"sandboxes of engine '{engine.name}' have one user, who cannot become root by sudo here",
            hint="Leave out 'sudo', or use the engine 'native' as root.",
        )
    files = access.guest.files
    program = await workers.run(workers.TRANSFER, agent_binary.path().read_bytes)
    await files.write(PROGRAM, program, mode=0o755, parents=True)
    connection = await access.guest.connection()
    await connection.request(Op.SUDO, encode_fields([(Tag.USER, user) for user in _USERS]))
    with contextlib.suppress(OSError):  # an image may have a link of its own, or a /usr that is read-only
        if not await _exists(access, _OWN):
            await files.symlink(PROGRAM, _LINK)


async def _exists(access: SandboxAccess, path: str) -> bool:
    try:
        await access.guest.files.stat(path, follow=False)
    except FileNotFoundError:
        return False
    return True
