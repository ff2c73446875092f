"""Changes of files, reported as they happen."""

from __future__ import annotations

import asyncio

from atoll.conformance.bench import Bench
from atoll.conformance.check import check, must, must_equal
from atoll.guest.files import AsyncWatch, FileEvent, FileEventKind


async def _until(events: AsyncWatch, *wanted: tuple[FileEventKind, str]) -> list[FileEvent]:
    """Read events until all of these were seen."""
    missing, seen = set(wanted), []
    try:
        async with asyncio.timeout(15):
            while missing:
                event = await anext(events)
                seen.append(event)
                missing.discard((event.kind, event.path))
    except TimeoutError as error:
        raise AssertionError(f"{sorted(missing)} was not told, only {seen}") from error
    return seen


@check()
async def changes_are_told(bench: Bench) -> None:
    """Files that are made, changed, moved and removed, by commands or by us."""
    async with bench.sandbox() as sandbox:
        async with sandbox.watch() as events:
            await sandbox.exec("echo x >made", timeout=10)
            await _until(events, (FileEventKind.CREATED, "made"), (FileEventKind.MODIFIED, "made"))
            await sandbox.chmod("made", 0o600)
            await _until(events, (FileEventKind.ATTRIBUTES, "made"))
            await sandbox.move("made", "moved")
            await _until(events, (FileEventKind.MOVED_FROM, "made"), (FileEventKind.MOVED_TO, "moved"))
            await sandbox.remove("moved")
            await _until(events, (FileEventKind.REMOVED, "moved"))


@check()
async def new_directories_are_watched_too(bench: Bench) -> None:
    """What is made in a directory that was just made is told, however soon it came."""
    async with bench.sandbox() as sandbox:
        await sandbox.make_dir("there")
        async with sandbox.watch() as events:
            await sandbox.exec("echo x >there/file", timeout=10)
            await _until(events, (FileEventKind.CREATED, "there/file"))
            await sandbox.exec("mkdir -p new/deep/er && echo x >new/deep/er/file", timeout=10)
            seen = await _until(events, (FileEventKind.CREATED, "new"), (FileEventKind.CREATED, "new/deep/er/file"))
            kinds = {event.path: event.is_dir for event in seen if event.kind is FileEventKind.CREATED}
            must(kinds["new"] and not kinds["new/deep/er/file"], "directories and files are mixed up")
            await sandbox.exec("echo y >>new/deep/er/file; mv new renamed; echo z >renamed/deep/er/later", timeout=10)
            await _until(events, (FileEventKind.MODIFIED, "new/deep/er/file"), (FileEventKind.MOVED_TO, "renamed"))


@check()
async def one_directory_can_be_watched_alone(bench: Bench) -> None:
    """Without `recursive` only what is directly in it is told."""
    async with bench.sandbox() as sandbox:
        await sandbox.make_dir("below")
        async with sandbox.watch(recursive=False) as events:
            await sandbox.write_file("below/file", "x")
            await sandbox.exec("touch last", timeout=10)
            seen = await _until(events, (FileEventKind.CREATED, "last"))
            must_equal([event.path for event in seen if "/" in event.path], [], "what is told from below")


@check()
async def a_watch_ends_when_it_is_left(bench: Bench) -> None:
    """And several may watch the same directory."""
    async with bench.sandbox() as sandbox:
        async with sandbox.watch() as one, sandbox.watch() as two:
            await sandbox.exec("touch file", timeout=10)
            await _until(one, (FileEventKind.CREATED, "file"))
            await _until(two, (FileEventKind.CREATED, "file"))
            waiting = asyncio.ensure_future(anext(one, None))
            await one.aclose()
            async with asyncio.timeout(10):
                while await waiting is not None:
                    waiting = asyncio.ensure_future(anext(one, None))
            await sandbox.exec("touch other", timeout=10)
            await _until(two, (FileEventKind.CREATED, "other"))


@check()
async def odd_names_are_told(bench: Bench) -> None:
    """Also names in no encoding."""
    async with bench.sandbox() as sandbox:
        async with sandbox.watch() as events:
            name = "odd \udcff\n name"
            await sandbox.make_dir(name)
            await _until(events, (FileEventKind.CREATED, name))


@check()
async def losses_are_told(bench: Bench) -> None:
    """A flood of changes that nobody reads ends with the word that some were lost, or with all of them."""
    async with bench.sandbox() as sandbox:
        async with sandbox.watch() as events:
            made = await sandbox.exec("i=0; while [ $i -lt 20000 ]; do : >f; i=$((i+1)); done; : >last", timeout=50)
            must_equal(made.exit_code, 0, "making changes")
            async with asyncio.timeout(20):
                async for event in events:
                    if event.kind is FileEventKind.OVERFLOW or event.path == "last":
                        return
        must(False, "the watch ended by itself")
