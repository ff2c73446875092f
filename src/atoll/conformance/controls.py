"""Controls: enforced where they are declared, refused by name elsewhere. None is silently weakened."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from atoll.conformance import host
from atoll.conformance.bench import Bench, new_mark
from atoll.conformance.check import check, must, must_equal, refusal
from atoll.engines.contract import Pausable
from atoll.errors import SandboxGoneError, SandboxPausedError, SandboxResourceError, SpecError, UnsupportedError
from atoll.model import Capability, Cause, State

_SOMEBODY = 4321
"""The id of an ordinary user of the host, who need not exist."""
_ASKED: dict[Capability, dict[str, Any]] = {
    Capability.MEMORY: {"limits": {"memory_bytes": "64m"}},
    Capability.CPUS: {"limits": {"cpus": 0.5}},
    Capability.PIDS: {"limits": {"pids": 32}},
    Capability.DISK: {"limits": {"disk_bytes": "32m"}},
    Capability.INODES: {"limits": {"inodes": 200}},
    Capability.OPEN_FILES: {"limits": {"open_files": 100}},
    Capability.SHM: {"limits": {"shm_bytes": "8m"}},
    Capability.NAMED_VOLUMES: {"volumes": [{"name": "data", "path": "/volume"}]},
    Capability.VOLUMES: {"volumes": [{"host": "/usr", "path": "/volume", "read_only": True}]},
}


_DEFAULTS = {
    "memory_bytes": Capability.MEMORY,
    "cpus": Capability.CPUS,
    "pids": Capability.PIDS,
    "disk_bytes": Capability.DISK,
    "open_files": Capability.OPEN_FILES,
}


def _refused(capability: Capability) -> Callable[[Bench], Awaitable[None]]:
    async def refused(bench: Bench) -> None:
        sandbox = bench.unmade(**_ASKED[capability])
        error = await refusal(sandbox.create(), UnsupportedError, f"a sandbox with {capability}")
        named = capability in error.reason or capability.replace("_", " ") in error.reason
        must(named, f"the error does not name the control: {error.reason}")
        must(error.hint, "the error does not say what to do")
        must_equal(error.code, "unsupported", "the code of the error")
        must_equal(host.traces(bench.settings, sandbox.id), [], "what the refused sandbox left")
        must(await bench.handle(sandbox.id) is None, "the refused sandbox is listed")

    refused.__name__ = f"{capability}_is_refused_by_name"
    refused.__doc__ = f"An engine that cannot enforce {capability} says so before anything is made."
    return refused


for _capability in _ASKED:
    check(without={_capability})(_refused(_capability))


@check()
async def a_limit_that_nobody_asked_for_is_given_or_reported(bench: Bench) -> None:
    """There is a default for each, or its absence is reported; one that is declared is not left out."""
    async with bench.sandbox() as sandbox:
        found = await sandbox.info()
        capabilities = (await bench.engine.describe()).capabilities
        for name, capability in _DEFAULTS.items():
            given, left_out = getattr(found.limits, name) is not None, name in found.limits_left_out
            must(given != left_out, f"the default of {name} is given: {given}, and left out: {left_out}")
            must(given or capability not in capabilities, f"{name} could be limited, and is not")
        must_equal((await sandbox.exec("ulimit -n", timeout=10)).stdout, f"{found.limits.open_files}\n", "open files")


@check(needs={Capability.MEMORY})
async def memory_is_bounded(bench: Bench) -> None:
    """A command that takes more than there is dies; the sandbox goes on or says that memory was the cause."""
    async with bench.sandbox(**_ASKED[Capability.MEMORY]) as sandbox:
        must(
            (await sandbox.exec("dd if=/dev/zero of=/dev/null bs=8M count=1", timeout=20)).success, "little is refused"
        )
        try:
            result = await sandbox.exec("dd if=/dev/zero of=/dev/null bs=300M count=1", timeout=30)
            must(not result.success, "a command took 300 MiB of the 64 MiB that there are")
            must(result.cause in (Cause.EXIT, Cause.SIGNAL, Cause.OUT_OF_MEMORY), f"its cause is {result.cause}")
            must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "the sandbox afterwards")
        except SandboxGoneError as error:
            must_equal(error.cause, Cause.OUT_OF_MEMORY, "the cause of the sandbox's end")


@check(needs={Capability.CPUS})
async def processor_time_is_bounded(bench: Bench) -> None:
    """Two busy commands together get no more than half a processor."""
    async with bench.sandbox(**_ASKED[Capability.CPUS]) as sandbox:
        busy = (sandbox.exec("while :; do :; done", timeout=2) for _ in range(2))
        before, results = (await sandbox.stats()).cpu_s, await asyncio.gather(*busy)
        after = (await sandbox.stats()).cpu_s
        # The host's figure, if there is one: a kernel of the sandbox's own counts waiting as work.
        spent = sum(result.cpu_s for result in results) if before is None or after is None else after - before
        used = spent / max(result.duration_s for result in results)
        must(used < 0.8, f"half a processor was allowed and {used:.2f} were used")


@check(needs={Capability.PIDS})
async def the_number_of_processes_is_bounded(bench: Bench) -> None:
    """A command that forks without end fails, and once it is gone the sandbox works as before."""
    async with bench.sandbox(**_ASKED[Capability.PIDS]) as sandbox:
        mark = new_mark()
        script = f"i=0; while [ $i -lt 100 ]; do sleep {mark} & i=$((i+1)); done; echo all"
        async with asyncio.timeout(40):
            command = await sandbox.start(["sh", "-c", script], timeout=5)
            result = await command.wait()
            must("all" not in result.stdout, "100 processes were started where 32 are allowed")
            await command.kill()
            must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "the sandbox afterwards")


@check(needs={Capability.DISK})
async def disk_space_is_bounded(bench: Bench) -> None:
    """Writing more fails with "no space", and removing gives the space back."""
    async with bench.sandbox(**_ASKED[Capability.DISK]) as sandbox:
        for _ in range(2):
            result = await sandbox.exec("head -c 64m /dev/zero >big && sync big", timeout=50)
            must(not result.success, "64 MiB were written where 32 MiB are allowed")
            must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "the sandbox with a full disk")
            await sandbox.remove("big")
            await sandbox.exec("sync", timeout=20)


@check(needs={Capability.INODES})
async def the_number_of_files_is_bounded(bench: Bench) -> None:
    """Making more files than allowed fails."""
    async with bench.sandbox(**_ASKED[Capability.INODES]) as sandbox:
        result = await sandbox.exec("i=0; while [ $i -lt 500 ]; do : >f$i || exit 9; i=$((i+1)); done", timeout=30)
        must(not result.success, "500 files were made where 200 are allowed")
        must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "the sandbox afterwards")


@check(needs={Capability.OPEN_FILES})
async def the_number_of_open_files_is_bounded(bench: Bench) -> None:
    """Commands, shells and terminals have the limit that was asked for and cannot raise it."""
    async with bench.sandbox(**_ASKED[Capability.OPEN_FILES]) as sandbox:
        must_equal((await sandbox.exec("ulimit -n", timeout=10)).stdout, "100\n", "the limit of a command")
        must_equal((await sandbox.exec("ulimit -Hn", timeout=10)).stdout, "100\n", "the hard limit of a command")
        must_equal(await sandbox.run_command("ulimit -n", 10), "100", "the limit of the shell")


@check(needs={Capability.OPEN_FILES})
async def a_small_number_of_open_files_is_survived(bench: Bench) -> None:
    """With few, commands work one at a time, and too many at once are errors, never the sandbox's end."""
    async with bench.sandbox(limits={"open_files": 64}) as sandbox:
        attempts = (sandbox.exec("sleep 0.2; echo ok", timeout=20) for _ in range(40))
        async with asyncio.timeout(40):
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        for outcome in outcomes:
            must(not isinstance(outcome, BaseException) or isinstance(outcome, OSError), f"one ended with {outcome!r}")
        must_equal((await sandbox.exec("echo ok", timeout=10)).stdout, "ok\n", "the sandbox afterwards")


@check(needs={Capability.SHM})
async def the_size_of_shared_memory_is_that_of_the_spec(bench: Bench) -> None:
    """It takes as much as was asked for, and not more."""
    for megabytes in (8, 96):
        async with bench.sandbox(limits={"shm_bytes": f"{megabytes}m"}) as sandbox:
            less, more = megabytes - 4, megabytes + 4
            fitting = await sandbox.exec(f"head -c {less}m /dev/zero >/dev/shm/file", timeout=30)
            must(fitting.success, f"{less} MiB do not fit into {megabytes}")
            exceeding = await sandbox.exec(f"head -c {more}m /dev/zero >/dev/shm/file", timeout=30)
            must(not exceeding.success, f"{more} MiB were written where {megabytes} fit")


@check(needs={Capability.VOLUMES})
async def volumes_show_the_host_as_far_as_allowed(bench: Bench) -> None:
    """A writable one in both directions, a read-only one in one, a single file, and nothing beside them."""
    async with bench.folder() as folder:
        for name in ("rw", "ro"):
            (folder / name).mkdir()
            (folder / name).chmod(0o777)
            (folder / name / "file").write_text(name)
        if os.geteuid() == 0:  # an engine may refuse writes to files that belong to root
            os.chown(folder / "rw", _SOMEBODY, _SOMEBODY)
        (folder / "single").write_text("single")
        volumes = [
            {"host": str(folder / "rw"), "path": "/data/rw"},
            {"host": str(folder / "ro"), "path": "/data/ro", "read_only": True},
            {"host": str(folder / "single"), "path": "/data/single", "read_only": True},
        ]
        async with bench.sandbox(volumes=volumes) as sandbox:
            shown = await sandbox.exec("cat /data/rw/file /data/ro/file /data/single; ls /data", timeout=10)
            must_equal(shown.stdout, "rwrosinglero\nrw\nsingle\n", "what the volumes show")
            written = await sandbox.exec("echo inside >/data/rw/new", timeout=10)
            must(written.success, f"a writable volume cannot be written to: {written.stderr}")
            must_equal((folder / "rw/new").read_text(), "inside\n", "what the host sees")
            for command in (
                "echo x >/data/ro/new",
                "rm /data/ro/file",
                "echo x >/data/single",
                "chmod 0 /data/ro/file",
            ):
                must(not (await sandbox.exec(command, timeout=10)).success, f"{command!r} works on a read-only volume")
        must((folder / "rw/new").exists() and (folder / "ro/file").exists(), "deleting the sandbox emptied its volumes")


@check(needs={Capability.VOLUMES})
async def a_volume_that_is_missing_is_refused(bench: Bench) -> None:
    """SpecError that names the path, and nothing is made, neither the sandbox nor the path."""
    async with bench.folder() as folder:
        missing = folder / "missing"
        sandbox = bench.unmade(volumes=[{"host": str(missing), "path": "/data"}])
        error = await refusal(sandbox.create(), SpecError, "a volume that does not exist")
        must(str(missing) in error.reason, f"the error does not name it: {error.reason}")
        must(not missing.exists(), "the missing directory was made on the host")
        must_equal(host.traces(bench.settings, sandbox.id), [], "what the refused sandbox left")


@check(needs={Capability.PIDS})
async def a_shell_command_that_hits_a_limit_in_silence_is_an_error(bench: Bench) -> None:
    """No empty text that looks like success where there may be no more processes."""
    async with bench.sandbox(limits={"pids": 32}) as sandbox:
        bomb = "for i in $(seq 64); do sleep 5 & done"
        error = await refusal(
            sandbox.run_command(f"sh -c '{bomb}; wait' >/dev/null 2>&1; false", 30), SandboxResourceError, "a fork bomb"
        )
        must("pids" in str(error), f"the error: {error}")


@check(needs={Capability.PAUSE})
async def a_paused_sandbox_stands_still(bench: Bench) -> None:
    """Nothing runs in it until it is resumed, and then everything goes on."""
    engine = bench.engine
    if not isinstance(engine, Pausable):
        raise AssertionError("the engine declares pause, but has no pause and resume")
    async with bench.sandbox() as sandbox:
        handle = await bench.handle(sandbox.id)
        assert handle is not None
        await sandbox.start("while :; do echo >>ticks; sleep 0.01; done")
        await engine.pause(handle)
        must_equal((await sandbox.inspect()).state, State.PAUSED, "the state")
        waiting = asyncio.create_task(sandbox.exec("echo on", timeout=30))
        await asyncio.sleep(0.3)
        told = waiting.done() and isinstance(waiting.exception(), SandboxPausedError)
        must(told or not waiting.done(), "a command ran in a paused sandbox")
        await engine.resume(handle)
        try:
            result = await waiting
        except SandboxPausedError:  # the command was not sent at all, and its caller knows
            result = await sandbox.exec("echo on", timeout=30)
        must_equal(result.stdout, "on\n", "the command after resuming")
        must_equal((await sandbox.inspect()).state, State.RUNNING, "the state after resuming")
