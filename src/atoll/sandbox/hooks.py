"""Hooks: programs of an image that run as root in a sandbox after it was created, forked, restored or rolled back.

They let software inside reseed, reconnect and rename itself before anybody uses the sandbox. The agent is asked to run
the program if there is one, so the host never opens a path of the sandbox.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from atoll.engines.contract import SetsUp
from atoll.errors import AgentUnreachableError, StartError
from atoll.guest.processes import CompletedProcess, StartRequest
from atoll.model import BUILD_LABEL, Cause, default_user
from atoll.printable import printable
from atoll.sandbox import sudo
from atoll.sandbox.command import execution_result, new_command_id
from atoll.sandbox.sandbox_access import SandboxAccess

Hook = Literal["created", "forked", "restored", "rolled-back"]
FOLDER = "/etc/atoll/hooks"
HOOK_S = 30.0
"""How long a hook may take."""
_KEPT_BYTES = 16 << 10
_SHOWN = 200
_FROM_STATES = ("snapshot:", "step:")


def hook_of_new(access: SandboxAccess) -> Hook:
    """Return the hook of a sandbox that was just made."""
    return "forked" if access.handle().is_prewarmed or access.spec.image.startswith(_FROM_STATES) else "created"


async def begin(access: SandboxAccess, hook: Hook) -> None:
    """Prepare a sandbox whose processes begin anew: switch on sudo and run the hook, unless the engine does so. Raises
    StartError if the hook fails."""
    if not isinstance(await access.engine(), SetsUp):
        await sudo.allow(access)
        await run_hook(access, hook)


async def run_hook(access: SandboxAccess, hook: Hook) -> None:
    """Run the hook if the image has it, unless the engine does so. Raises StartError if it fails."""
    engine = await access.engine()
    if isinstance(engine, SetsUp) or BUILD_LABEL in access.spec.labels or (await engine.describe()).isolation is None:
        return
    request = StartRequest(
        id=new_command_id().encode(),
        argv=[f"{FOLDER}/{hook}"],
        env={"ATOLL_HOOK": hook, "ATOLL_SANDBOX_ID": access.sandbox_id, "ATOLL_IMAGE": access.spec.image},
        cwd="/",
        user=None if default_user(access.spec) is None else "0",
        deadline_s=HOOK_S,
        existing=True,
        forget=True,
    )
    try:
        done = await access.guest.processes.run(request, limit_bytes=_KEPT_BYTES)
    except FileNotFoundError:
        # Until its next turn the event loop holds the error, and so the frames and objects of all callers.
        await asyncio.sleep(0)
        return
    except AgentUnreachableError:
        await access.explain()  # raises the reason if the sandbox has ended
        raise
    await _judge(hook, done)


async def _judge(hook: Hook, done: CompletedProcess) -> None:
    result = await execution_result(done.exit, done.stdout, done.stderr)
    if result.success or result.stderr == f"atoll: {FOLDER}/{hook}: not found\n":
        return  # the latter is the answer of an older agent, in saved memory, if there is no hook
    how = (
        f"took longer than {HOOK_S:g} s"
        if result.cause is Cause.TIMEOUT
        else f"ended with exit code {result.exit_code}"
    )
    output = (result.stdout_bytes + result.stderr_bytes).decode(errors="replace")
    lines = output.strip().splitlines()
    last = f": {printable(lines[-1], instead=' ')[:_SHOWN]}" if lines else ""
    raise StartError(f"the hook '{hook}' of its image {how}{last}", hint=f"See {FOLDER} in the image.", output=output)
