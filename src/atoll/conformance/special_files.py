"""Special files: whatever a sandbox puts in the way, no call blocks."""

from __future__ import annotations

import asyncio

from atoll.conformance.bench import Bench
from atoll.conformance.check import check
from atoll.conformance.findings import SkippedError, must, must_equal, refusal, until
from atoll.sandbox.sandbox import AsyncSandbox

_SOCKET = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen(); time.sleep(1000)"


async def _make(bench: Bench, sandbox: AsyncSandbox) -> list[str]:
    """Create a fifo, links to endless devices, and a socket if the image has Python. Returns the paths to try."""
    await sandbox.exec("mkfifo fifo; ln -s fifo to-fifo; ln -s /dev/zero to-zero", timeout=10)
    found = ["fifo", "to-fifo", "to-zero", "/dev/zero", "/dev/random", "/dev/tty", "/dev/stdin"]
    if await bench.has("python3"):
        await sandbox.start(["python3", "-c", _SOCKET])
        await until(lambda: sandbox.exists("sock"), "a program that makes a socket does not")
        found.append("sock")
    return found


@check()
async def reading_one_is_refused_at_once(bench: Bench) -> None:
    """Fifos, devices, sockets and links to them are an OSError, never a wait and never an endless file."""
    async with bench.sandbox() as sandbox:
        for path in await _make(bench, sandbox):
            async with asyncio.timeout(10):
                await refusal(sandbox.read_bytes(path), OSError, f"reading {path!r}")
        must_equal((await sandbox.exec("echo ok", timeout=5)).stdout, "ok\n", "the sandbox afterwards")


@check()
async def writing_to_one_never_blocks(bench: Bench) -> None:
    """It is replaced by a file or refused, and appending is refused."""
    async with bench.sandbox() as sandbox:
        await sandbox.exec("mkfifo one two three", timeout=10)
        async with asyncio.timeout(10):
            for path in ("one", "two"):
                await refusal(sandbox.append_file(path, "x"), OSError, "appending to a fifo")
            try:
                await sandbox.write_file("three", "content")
            except OSError:
                return
        must_equal(await sandbox.read_file("three"), "content", "what was written over a fifo")


@check()
async def looking_at_one_never_blocks(bench: Bench) -> None:
    """They can be listed, walked, moved, changed and removed like any file."""
    async with bench.sandbox() as sandbox:
        await _make(bench, sandbox)
        async with asyncio.timeout(10):
            must_equal(str((await sandbox.stat("fifo")).kind), "fifo", "the kind of a fifo")
            must_equal(str((await sandbox.stat("/dev/zero")).kind), "char_device", "the kind of a device")
            must(len([info async for info in sandbox.walk()]) >= 3, "not everything is found")
            await sandbox.chmod("fifo", 0o600)
            await sandbox.move("fifo", "moved")
            await sandbox.remove("moved")


@check()
async def copying_leaves_them_out_and_says_so(bench: Bench) -> None:
    """Everything else of the tree is copied; what was left out is told in an OSError."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        await sandbox.write_file("tree/file", "content")
        await sandbox.exec("mkfifo tree/fifo; ln -s /dev/zero tree/link", timeout=10)
        async with asyncio.timeout(20):
            error = await refusal(sandbox.copy_from("tree", folder / "out"), OSError, "a tree with a fifo")
        must("fifo" in str(error), f"the error does not say what was left out: {error}")
        must_equal((folder / "out/file").read_text(), "content", "the file beside the fifo")
        must(not (folder / "out/fifo").exists(), "the fifo was copied")
        must((folder / "out/link").is_symlink(), "a link to a device is not a link on the host")
        async with asyncio.timeout(20):
            await refusal(sandbox.copy_from("tree/fifo", folder / "single"), OSError, "copying a fifo")
            await refusal(sandbox.copy_from("/dev/zero", folder / "single"), OSError, "copying a device")


@check()
async def a_socket_is_no_port_unless_somebody_listens(bench: Bench) -> None:
    """Connecting to a file that is no listening socket is refused at once."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("plain", "x")
        async with asyncio.timeout(10):
            await refusal(sandbox.connect_socket("plain"), OSError, "connecting to a plain file")
            await refusal(sandbox.connect_socket("missing"), FileNotFoundError, "connecting to a missing file")
        if not await bench.has("python3"):
            raise SkippedError("the image has no python3 to make a socket with")
        await sandbox.exec(["python3", "-c", "import socket; socket.socket(socket.AF_UNIX).bind('dead')"], timeout=10)
        async with asyncio.timeout(10):
            await refusal(sandbox.connect_socket("dead"), ConnectionRefusedError, "connecting to a dead socket")
