"""Carrying out RUN: a command in a sandbox, with what is mounted for it, and why it failed if it did."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

from atoll import workers
from atoll.builds.placed_files import PlacedFile, placed
from atoll.builds.site import Site
from atoll.builds.source_tree import SourceTree
from atoll.builds.steps import RunCommand, RunMount, Step
from atoll.builds.users import user_of_commands
from atoll.errors import BuildError, SandboxGoneError
from atoll.guest.start_request import StartRequest
from atoll.model import Cause, ExecutionResult
from atoll.sandbox.command import new_command_id
from atoll.sandbox.execution import run_to_end
from atoll.sandbox.sandbox import AsyncSandbox

_KEPT_BYTES = 64 << 10
_SECRET_MODE = 0o400
_SCRIPT_MODE = 0o755
_SCRIPTS = "/run/atoll-scripts"
_HINTS = {
    Cause.OUT_OF_MEMORY: "Give the build more: --memory 4g.",
    Cause.DISK_FULL: "Give the build more: --disk 20g.",
    Cause.PIDS: "It started too many processes. Give the build more: --pids 4096.",
    Cause.TIMEOUT: "Give the build more time: --timeout SECONDS.",
}
_WHAT = {
    Cause.OUT_OF_MEMORY: "was killed: the memory of the build was used up",
    Cause.DISK_FULL: "failed: the disk of the build is full",
    Cause.PIDS: "failed: the processes of the build were used up",
    Cause.TIMEOUT: "was killed: it took too long",
}


async def run(site: Site, sandbox: AsyncSandbox, step: Step, action: RunCommand) -> None:
    """Run the command of a step. When this returns, nothing of it runs any more, and what was there only for it is
    gone. Raises BuildError if it fails."""
    files = sandbox.access.files()
    user = await user_of_commands(files, action.user)
    if action.work_dir != "/":
        await files.make_dir(action.work_dir)
    argv = list(action.argv)
    async with contextlib.AsyncExitStack() as opened:
        extra = await _files(site, action, opened)
        if action.script is not None:
            path = f"{_SCRIPTS}/{action.script.name}"
            extra.append(PlacedFile.of(path, action.script.content.encode(errors="surrogateescape"), _SCRIPT_MODE))
            argv = [path]
        async with placed(sandbox, extra):
            if action.network == "none" and sandbox.spec.network != "none":
                await sandbox.set_network("none")
            await _command(site, sandbox, step, action, argv, user)
            if action.network == "none" and site.policy() != "none":
                await sandbox.set_network(site.policy())


async def _command(
    site: Site, sandbox: AsyncSandbox, step: Step, action: RunCommand, argv: Sequence[str], user: str
) -> None:
    timeout_s = site.step_timeout_s()
    id = new_command_id()
    request = StartRequest(
        id=id.encode(),
        argv=argv,
        env=_environment(site, action),
        cwd=action.work_dir,
        user=user,
        clean=True,
        forget=True,
        deadline_s=timeout_s if math.isfinite(timeout_s) else None,
    )
    output = site.reporter.output_of(step)
    try:
        result = await run_to_end(sandbox.access, request, timeout_s, _KEPT_BYTES, on_output=output.add)
    except SandboxGoneError as error:
        raise _gone(error, output.finish()) from error
    except OSError as error:
        raise BuildError(f"the command cannot be started: {error.strerror}", hint=_start_hint(action)) from error
    last = output.finish()
    if not result.success:
        raise failure(result, last)
    # Whatever the command has left running would write into the next step.
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        await sandbox.access.guest.processes.kill(id.encode())


def _environment(site: Site, action: RunCommand) -> dict[str, str]:
    ours = dict(site.request.mirrors.variables) if site.request.mirrors is not None else {}
    secret = {
        mount.env: site.request.secrets[mount.id].decode(errors="surrogateescape")
        for mount in action.mounts
        if mount.type == "secret" and mount.env
    }
    return {**ours, **action.proxies, **action.env, **secret}


async def _files(site: Site, action: RunCommand, opened: contextlib.AsyncExitStack) -> list[PlacedFile]:
    """Return the files that are there only for this command."""
    mirrors = site.request.mirrors.files if site.request.mirrors is not None else {}
    found = [PlacedFile.of(path, content) for path, content in mirrors.items()]
    for mount in action.mounts:
        if mount.type == "secret" and mount.target:
            mode = _SECRET_MODE if mount.mode is None else mount.mode
            content = site.request.secrets[mount.id]
            found.append(PlacedFile.of(mount.target, content, mode & 0o777, (mount.uid, mount.gid)))
        elif mount.type == "bind" and (file := await bound_file(site, mount, opened)) is not None:
            found.append(file)
    return found


async def bound_file(site: Site, mount: RunMount, opened: contextlib.AsyncExitStack) -> PlacedFile | None:
    """Return the file that a bind mount shows; None if it shows a directory."""
    tree = await tree_of(site, mount, opened)
    source = (await workers.run(workers.TRANSFER, tree.select, mount.source))[0]
    if source.is_directory:
        return None
    entry = source.entries[0]
    return PlacedFile(mount.target, functools.partial(tree.open, entry), entry.size, entry.mode, (entry.uid, entry.gid))


async def tree_of(site: Site, mount: RunMount, opened: contextlib.AsyncExitStack) -> SourceTree:
    assert mount.origin is not None
    if mount.origin.kind == "context":
        return site.context
    return await opened.enter_async_context(site.opened(mount.origin))


def failure(result: ExecutionResult, output: str) -> BuildError:
    what = _WHAT.get(result.cause, f"failed with exit code {result.exit_code}")
    return BuildError(
        f"the command {what}",
        hint=_HINTS.get(result.cause),
        exit_code=result.exit_code,
        cause=str(result.cause),
        output=output,
    )


def _gone(error: SandboxGoneError, output: str) -> BuildError:
    try:
        cause = Cause(error.cause)
    except ValueError:
        cause = Cause.LOST
    what = _WHAT.get(cause, f"ended with its sandbox: {error.reason}")
    return BuildError(f"the command {what}", hint=_HINTS.get(cause), cause=str(cause), output=output)


def _start_hint(action: RunCommand) -> str:
    named = f" USER is {action.user[:80]!r}:" if action.user else ""
    return f"Check USER and WORKDIR:{named} it has to be in /etc/passwd of the stage, or a number."
