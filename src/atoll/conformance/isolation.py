"""Isolation: a sandbox sees nothing of the host or of other sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator

from atoll.conformance.bench import Bench, new_mark
from atoll.conformance.check import check, must, must_equal, refusal
from atoll.conformance.inside import running
from atoll.engines.contract import IsolationLevels, supporting
from atoll.model import Capability
from atoll.sandbox.sandbox import AsyncSandbox

_WALL = {Capability.ISOLATION}


@contextlib.contextmanager
def _listening(family: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family) as server:
        server.bind(address)  # type: ignore[arg-type]
        server.listen()
        yield server


@check()
async def the_isolation_level_is_reported_as_it_is(bench: Bench) -> None:
    """`info` says which one a sandbox has, whether it asked for one or not; so does a later attachment.

    A kernel in user space or of a virtual machine is not the one that sandboxes with namespaces run on.
    """
    described = await bench.engine.describe()
    engine = await supporting(bench.engine, IsolationLevels)
    levels = {described.isolation} if engine is None else set(await engine.levels())
    kernels: dict[str | None, str] = {}
    for asked in (None, *sorted(level for level in levels if level is not None)):
        async with bench.sandbox(isolation=asked) as sandbox:
            has = asked or described.isolation
            must_equal((await sandbox.info()).isolation, has, f"the isolation of a sandbox that asked for {asked}")
            kernels[has] = (await sandbox.exec("cat /proc/sys/kernel/osrelease", timeout=10)).stdout
            again = await AsyncSandbox.attach(sandbox.id, engine=bench.engine, settings=bench.settings)
            must_equal((await again.info()).isolation, has, "the isolation that an attached sandbox reports")
            await again.detach()
    shared = [level for level in kernels if level != "namespaces" and kernels[level] == kernels.get("namespaces")]
    must_equal(shared, [], "the levels with a kernel of their own that have the host's")


@check(needs=_WALL)
async def it_sees_only_its_own_processes(bench: Bench) -> None:
    """No process of the host and none of another sandbox can be seen or signalled."""
    mine, other = new_mark(), new_mark()
    process = await asyncio.create_subprocess_exec("sleep", mine)
    try:
        async with bench.sandbox() as sandbox, bench.sandbox() as neighbour:
            await neighbour.start(f"sleep {other}")
            must_equal(await running(sandbox, mine), [], "the host's processes that the sandbox sees")
            must_equal(await running(sandbox, other), [], "the neighbour's processes that the sandbox sees")
            await sandbox.exec(f"kill -9 {process.pid}", timeout=10)
            await sandbox.exec("kill -9 -1", timeout=10)
            must(process.returncode is None, "the sandbox killed a process of the host")
            must_equal(len(await running(neighbour, other)), 1, "the neighbour's processes")
    finally:
        process.kill()
        await process.wait()


@check(needs=_WALL)
async def a_command_that_kills_all_it_can_reaches_only_the_sandbox(bench: Bench) -> None:
    """`kill -9 -1` may end commands, never the sandbox: the next command works."""
    async with bench.sandbox() as sandbox:
        await sandbox.exec("kill -9 -1; kill -9 1; kill -TERM 1", timeout=10)
        async with asyncio.timeout(20):
            must_equal((await sandbox.exec("echo alive", timeout=10)).stdout, "alive\n", "the next command")


@check(needs=_WALL)
async def it_has_a_name_of_its_own(bench: Bench) -> None:
    """The host name inside is that of the spec, and the host keeps its own."""
    before = os.uname().nodename
    name = f"box-{new_mark()}"
    async with bench.sandbox(hostname=name) as sandbox:
        must_equal((await sandbox.exec("uname -n", timeout=10)).stdout.strip(), name, "the name inside")
        await sandbox.exec("hostname taken-over; echo taken-over > /proc/sys/kernel/hostname", timeout=10)
    must_equal(os.uname().nodename, before, "the host's name")


@check(needs=_WALL)
async def it_has_no_network_but_its_own_loopback(bench: Bench) -> None:
    """There is one interface, no way out, and the host's own loopback is another."""
    with _listening(socket.AF_INET, ("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        async with bench.sandbox() as sandbox:
            devices = await sandbox.exec("cat /proc/net/dev", timeout=10)
            names = [line.partition(":")[0].strip() for line in devices.stdout.splitlines() if ":" in line]
            must_equal(names, ["lo"], "the network interfaces")
            routes = (await sandbox.exec("cat /proc/net/route", timeout=10)).stdout.splitlines()[1:]
            must_equal(routes, [], "the routes")
            await refusal(sandbox.connect_port(port), ConnectionRefusedError, "a port of the host from inside")


@check(needs=_WALL)
async def sockets_of_the_host_cannot_be_reached(bench: Bench) -> None:
    """Neither those with a path nor abstract ones, which belong to no file system."""
    name = f"atoll-{secrets.token_hex(8)}"
    async with bench.folder() as folder:
        path = str(folder / "sock")
        with _listening(socket.AF_UNIX, f"\0{name}"), _listening(socket.AF_UNIX, path):
            os.chmod(path, 0o777)  # noqa: S103
            async with bench.sandbox() as sandbox:
                await refusal(sandbox.connect_socket(path), OSError, "a socket of the host")
                seen = (await sandbox.exec("cat /proc/net/unix", timeout=10)).stdout
                must(name not in seen, "an abstract socket of the host is visible")


@check(needs=_WALL)
async def files_of_the_host_cannot_be_seen(bench: Bench) -> None:
    """A file that everybody on the host may read is not there, and `/proc` leads nowhere else."""
    async with bench.folder() as folder:
        canary = folder / "canary"
        canary.write_text(secret := secrets.token_hex(16))
        canary.chmod(0o644)
        async with bench.sandbox() as sandbox:
            for path in (
                str(canary),
                f"/proc/1/root{canary}",
                f"/proc/self/root{canary}",
                f"/proc/{os.getpid()}/root{canary}",
            ):
                result = await sandbox.exec(["cat", path], timeout=10)
                must(secret not in result.stdout, f"the host's file can be read at {path!r}")
                await refusal(sandbox.read_file(path), OSError, f"reading {path!r}")
            for own in (bench.settings.data_dir, bench.settings.run_dir):
                listed = await sandbox.exec(["ls", "-R", str(own)], timeout=10)
                must(listed.exit_code != 0, "the sandbox can look into the directory of all sandboxes")


@check(needs=_WALL)
async def what_it_writes_stays_inside(bench: Bench) -> None:
    """Nothing written anywhere in a sandbox appears on the host or in another sandbox."""
    name = f"atoll-{secrets.token_hex(8)}"
    places = ("/tmp", "/var/tmp", "/", "/usr", "/usr/bin", "/etc", "/root", "/home", "/dev/shm", "/run", "/opt")  # noqa: S108
    async with bench.sandbox() as sandbox, bench.sandbox() as neighbour:
        for place in places:
            await sandbox.exec(["touch", f"{place}/{name}"], timeout=10)
        must(
            (await sandbox.exec(["test", "-e", f"{places[0]}/{name}"], timeout=10)).success,
            "it cannot write to its own /tmp",
        )
        await sandbox.write_file(name, "mine")
        for place in places:
            must(not os.path.exists(f"{place}/{name}"), f"what the sandbox wrote to {place} is on the host")
            must(
                not await neighbour.exists(f"{place}/{name}"),
                f"what the sandbox wrote to {place} is in another sandbox",
            )
        must(not await neighbour.exists(name), "the work directory is shared with another sandbox")


@check()
async def work_directories_are_private(bench: Bench) -> None:
    """Each sandbox starts with an empty work directory of its own."""
    async with bench.sandbox() as one, bench.sandbox() as two:
        must_equal(await one.list_files(), [], "a new work directory")
        await one.write_file("file", "one")
        must(not await two.exists("file"), "two sandboxes share their work directory")


@check()
async def no_descriptor_leaks_in(bench: Bench) -> None:
    """A command has its three descriptors and no other, in whatever way it is run."""
    async with bench.sandbox() as sandbox:
        # two commands: some shells replace themselves by the last one, and its descriptors would count
        script = "ls /proc/$$/fd; :"
        found = (await sandbox.exec(["sh", "-c", script], timeout=10)).stdout.split()
        must_equal(sorted(found), ["0", "1", "2"], "the descriptors of a command")
        command = await sandbox.start(["sh", "-c", script], stdin=True)
        must_equal(sorted((await command.wait()).stdout.split()), ["0", "1", "2"], "those of a background command")
        shell = (await sandbox.run_command(f"sh -c '{script}'", 10)).split()
        must_equal(sorted(shell), ["0", "1", "2"], "those of a command in the shell")


@check(needs=_WALL, without={Capability.USERS})
async def it_has_no_capabilities_and_gets_none(bench: Bench) -> None:
    """Every set is empty, and set-uid programs do not help."""
    async with bench.sandbox() as sandbox:
        status = (await sandbox.exec("cat /proc/self/status", timeout=10)).stdout.splitlines()
        values = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            must_equal(int(values[name], 16), 0, f"the capabilities in {name}")
        must_equal(values["NoNewPrivs"].strip(), "1", "whether new privileges are impossible")
        must((await sandbox.exec("id -u", timeout=10)).stdout.strip() != "0", "its user is root")


@check(needs=_WALL, without={Capability.USERS})
async def the_agent_cannot_be_traced(bench: Bench) -> None:
    """Its memory, descriptors and environment are closed to commands."""
    async with bench.sandbox() as sandbox:
        for path in ("mem", "environ", "maps", "fd/0"):
            result = await sandbox.exec(f"head -c 1 /proc/1/{path} >/dev/null", timeout=10)
            must(result.exit_code != 0, f"a command can read /proc/1/{path}")
        listed = await sandbox.exec("ls /proc/1/fd", timeout=10)
        must(listed.exit_code != 0, "a command can list the agent's descriptors")


@check(needs=_WALL)
async def the_kernel_cannot_be_changed(bench: Bench) -> None:
    """Its switches are read-only, file systems cannot be mounted, disks cannot be read."""
    async with bench.sandbox() as sandbox:
        for path in (
            "/proc/sysrq-trigger",
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/panic",
            "/sys/kernel/uevent_helper",
        ):
            # The present content is written again, and to the trigger a key that only prints help: no harm is done if
            # it works.
            line = f"value=$(cat {path} || echo h); printf '%s\\n' \"$value\" >>{path}"
            result = await sandbox.exec(f"{{ {line}; }} 2>/dev/null", timeout=10)
            must(result.exit_code != 0, f"{path} can be written to")
        mounted = await sandbox.exec("mkdir -p here && mount -t tmpfs none here", timeout=10)
        must(mounted.exit_code != 0, "a file system can be mounted")
        devices = await sandbox.exec("find /dev -type b", timeout=10)
        must_equal(devices.stdout, "", "the disks in /dev")
