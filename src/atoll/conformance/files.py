"""Files of a sandbox: read, written, listed, moved, removed."""

from __future__ import annotations

import asyncio
import os

from atoll.conformance.bench import Bench
from atoll.conformance.check import check
from atoll.conformance.findings import SkippedError, must, must_equal, refusal, until

ODD_NAMES = (
    "with space",
    " leading and trailing ",
    "new\nline",
    "tab\tand\rreturn",
    "-rf",
    "--",
    "*?[x]",
    "$HOME `id` $(id)",
    "quote'\"\\",
    "größe 日本 🏝",
    os.fsdecode(b"not utf-8 \xff\xfe\xe9"),
    "x" * 255,
    "...",
    "~",
    ";|&",
)


@check()
async def what_is_written_is_read(bench: Bench) -> None:
    """Text and bytes, empty and with every byte there is; commands see the same content."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("text", "größe\r\nend")
        must_equal(await sandbox.read_file("text"), "größe\r\nend", "the text")
        await sandbox.write_file("bytes", bytes(range(256)))
        must_equal(await sandbox.read_bytes("bytes"), bytes(range(256)), "the bytes")
        await sandbox.write_file("empty", "")
        must_equal((await sandbox.read_bytes("empty"), (await sandbox.stat("empty")).size), (b"", 0), "an empty file")
        must_equal((await sandbox.exec("cat text", timeout=10)).stdout, "größe\r\nend", "what a command reads")
        await refusal(sandbox.read_file("bytes"), UnicodeDecodeError, "reading bytes as text")
        await sandbox.exec("printf inside >made", timeout=10)
        must_equal(await sandbox.read_file("made"), "inside", "what a command wrote")


@check()
async def parents_are_made(bench: Bench) -> None:
    """Writing below directories that do not exist makes them."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("a/b/c/file", "x")
        must_equal(await sandbox.read_file("a/b/c/file"), "x", "the content")
        await sandbox.append_file("d/e/file", "y")
        must_equal(await sandbox.read_file("d/e/file"), "y", "the content of an appended file")
        await refusal(sandbox.write_file("a/b/c/file/below", "x"), NotADirectoryError, "a file below a file")


@check()
async def large_files_pass_in_both_directions(bench: Bench) -> None:
    """Five megabytes at once, in pieces, and in part."""
    content = os.urandom(1 << 20) * 5
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("large", content)
        must_equal((await sandbox.stat("large")).size, len(content), "the size")
        must(await sandbox.read_bytes("large") == content, "five megabytes are not what they were")
        pieces = [piece async for piece in sandbox.read_stream("large")]
        must(len(pieces) > 1 and b"".join(pieces) == content, "the pieces are not the whole")
        must(
            await sandbox.read_bytes("large", offset=1_000_000, length=2_000_000) == content[1_000_000:3_000_000],
            "a part is not what it should be",
        )
        must_equal(await sandbox.read_bytes("large", offset=len(content) + 5), b"", "a part behind the end")
        await sandbox.write_stream("streamed", (content[i : i + 100_000] for i in range(0, len(content), 100_000)))
        must(await sandbox.read_bytes("streamed") == content, "a file written in pieces is not what it should be")


@check()
async def appending_adds_to_the_end(bench: Bench) -> None:
    """And makes the file if there is none."""
    async with bench.sandbox() as sandbox:
        for text in ("a", "b\n", ""):
            await sandbox.append_file("log", text)
        await sandbox.append_file("log", b"\xff")
        must_equal(await sandbox.read_bytes("log"), b"ab\n\xff", "the content")


@check()
async def readers_never_see_half_a_file(bench: Bench) -> None:
    """A file is replaced as a whole: whoever reads meanwhile sees the old content or the new."""
    async with bench.sandbox() as sandbox:
        old, new = b"o" * 1_000_000, b"n" * 1_000_000
        await sandbox.write_file("file", old)

        async def write() -> None:
            for turn in range(10):
                await sandbox.write_file("file", (new, old)[turn % 2])

        writing = asyncio.create_task(write())
        while not writing.done():
            seen = await sandbox.read_bytes("file")
            must(seen in (old, new), f"a reader saw {len(seen)} bytes, mixed or cut")
        await writing
        must_equal([info.path for info in await sandbox.list_files()], ["file"], "the files beside it")


@check()
async def an_interrupted_write_changes_nothing(bench: Bench) -> None:
    """If the pieces fail, the old content stays and nothing lies beside it."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("file", "old")

        async def pieces() -> object:
            yield b"new" * 100_000
            raise LookupError("no more")

        await refusal(sandbox.write_stream("file", pieces()), LookupError, "a write whose source fails")  # type: ignore[arg-type]
        must_equal(await sandbox.read_file("file"), "old", "the content")

        async def alone() -> bool:
            return [info.path for info in await sandbox.list_files()] == ["file"]

        await until(alone, "a temporary file stays beside the target")


@check()
async def modes_are_given_kept_and_changed(bench: Bench) -> None:
    """A new file gets the mode that is asked for; a replaced one keeps its own; `chmod` changes it."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("plain", "x")
        must_equal((await sandbox.stat("plain")).mode, 0o644, "the mode of a new file")
        await sandbox.write_file("script", "#!/bin/sh\necho ran\n", mode=0o755)
        must_equal((await sandbox.exec(["./script"], timeout=10)).stdout, "ran\n", "what the script writes")
        await sandbox.write_file("script", "#!/bin/sh\necho again\n")
        must_equal((await sandbox.stat("script")).mode, 0o755, "the mode of a replaced file")
        must_equal((await sandbox.exec(["./script"], timeout=10)).stdout, "again\n", "what the new script writes")
        await sandbox.chmod("script", 0o600)
        must_equal((await sandbox.stat("script")).mode, 0o600, "the mode after chmod")
        await sandbox.write_file("script", "x", mode=0o640)
        must_equal((await sandbox.stat("script")).mode, 0o640, "the mode that was given for a replaced file")
        await sandbox.make_dir("private", mode=0o700)
        must_equal((await sandbox.stat("private")).mode, 0o700, "the mode of a new directory")


@check()
async def names_may_be_odd(bench: Bench) -> None:
    """Spaces, line breaks, quotes, unicode, no encoding at all, 255 bytes: written, listed, read, moved and removed."""
    async with bench.sandbox() as sandbox:
        for name in ODD_NAMES:
            await sandbox.write_file(name, name.encode(errors="surrogateescape"))
        listed = [info.path for info in await sandbox.list_files()]
        must_equal(listed, sorted(ODD_NAMES), "the names in the listing")
        for name in ODD_NAMES:
            must_equal(await sandbox.read_bytes(name), os.fsencode(name), f"the content of {name!r}")
            must(await sandbox.exists(name), f"{name!r} is said not to exist")
            await sandbox.move(name, "moved")
            await sandbox.remove("moved")
        must_equal(await sandbox.list_files(), [], "what is left")
        await refusal(sandbox.write_file("x" * 256, "x"), OSError, "a name that is too long")


@check()
async def a_missing_file_is_named(bench: Bench) -> None:
    """FileNotFoundError whose text says which path was not found, for every operation."""
    async with bench.sandbox() as sandbox:
        attempts = {
            "read_file": sandbox.read_file("no/such"),
            "read_bytes": sandbox.read_bytes("no/such"),
            "list_files": sandbox.list_files("no/such"),
            "stat": sandbox.stat("no/such"),
            "remove": sandbox.remove("no/such"),
            "move": sandbox.move("no/such", "target"),
            "chmod": sandbox.chmod("no/such", 0o600),
            "copy_from": sandbox.copy_from("no/such", "/nonexistent/atoll"),
            "watch": aiter(sandbox.watch("no/such")).__anext__(),
            "copy_to": sandbox.copy_to("/no/such", "x"),
        }
        for what, attempt in attempts.items():
            error = await refusal(attempt, FileNotFoundError, what)
            must("no/such" in str(error), f"{what} does not say which path was not found: {error}")
        await sandbox.remove("no/such", missing_ok=True)
        must(not await sandbox.exists("no/such"), "a missing file is said to exist")
        must(not await sandbox.exists("no/such/below"), "something below a missing file is said to exist")


@check()
async def a_directory_is_no_file(bench: Bench) -> None:
    """Reading or replacing one is an error that names it, listing a file too."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("dir/file", "x")
        error = await refusal(sandbox.read_file("dir"), OSError, "reading a directory")
        must("dir" in str(error), f"the error does not name it: {error}")
        await refusal(sandbox.write_file("dir", "x"), OSError, "writing over a directory")
        await refusal(sandbox.list_files("dir/file"), NotADirectoryError, "listing a file")
        await refusal(sandbox.make_dir("dir/file"), FileExistsError, "a directory over a file")
        await refusal(sandbox.remove("dir", recursive=False), OSError, "removing a full directory")
        must_equal(await sandbox.read_file("dir/file"), "x", "the file in it")
        await sandbox.make_dir("dir")


@check()
async def bad_paths_are_refused(bench: Bench) -> None:
    """Empty names, zero bytes and `..` that leaves the work directory are a ValueError, for every operation."""
    async with bench.sandbox() as sandbox:
        for path in ("", "a\0b", "..", "../x", "a/../../x", "/etc/../etc/passwd"):
            attempts = {
                "read_file": sandbox.read_file(path),
                "write_file": sandbox.write_file(path, "x"),
                "append_file": sandbox.append_file(path, "x"),
                "list_files": sandbox.list_files(path),
                "stat": sandbox.stat(path),
                "exists": sandbox.exists(path),
                "make_dir": sandbox.make_dir(path),
                "remove": sandbox.remove(path),
                "move from": sandbox.move(path, "x"),
                "move to": sandbox.move("x", path),
                "chmod": sandbox.chmod(path, 0o600),
                "copy_to": sandbox.copy_to("/etc", path),
                "copy_from": sandbox.copy_from(path, "/nonexistent/atoll"),
                "connect_socket": sandbox.connect_socket(path),
            }
            for what, attempt in attempts.items():
                await refusal(attempt, ValueError, f"{what} of {path!r}")
        await sandbox.write_file("a/../b", "inside")
        must_equal(await sandbox.read_file("./b"), "inside", "a path with .. that stays inside")


@check()
async def what_may_not_be_read_is_refused(bench: Bench) -> None:
    """A file without permissions is a PermissionError that names it."""
    async with bench.sandbox() as sandbox:
        if (await sandbox.exec("id -u", timeout=10)).stdout.strip() == "0":
            raise SkippedError("the sandbox's user is root, who may read everything")
        await sandbox.write_file("secret", "x", mode=0o000)
        error = await refusal(sandbox.read_file("secret"), PermissionError, "reading a file of mode 000")
        must("secret" in str(error), f"the error does not name it: {error}")
        await sandbox.make_dir("locked", mode=0o500)
        await refusal(sandbox.write_file("locked/x", "x"), PermissionError, "writing into a read-only directory")


@check()
async def listing_says_what_is_there(bench: Bench) -> None:
    """Kind, size, mode and target of each, sorted by name; `walk` goes below, parents first, and follows no link."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("b/file", "12345", mode=0o640)
        await sandbox.make_dir("a/deep/er")
        await sandbox.exec("ln -s b link; ln -s . b/loop; mkfifo pipe; ln -s missing dangling", timeout=10)
        listed = [(info.path, info.kind, info.target) for info in await sandbox.list_files()]
        expected = [
            ("a", "directory", None),
            ("b", "directory", None),
            ("dangling", "link", "missing"),
            ("link", "link", "b"),
            ("pipe", "fifo", None),
        ]
        must_equal([(path, str(kind), target) for path, kind, target in listed], expected, "the listing")
        info = await sandbox.stat("b/file")
        must_equal((str(info.kind), info.size, info.mode), ("file", 5, 0o640), "what stat says")
        must_equal(str((await sandbox.stat("link")).kind), "directory", "what a link leads to")
        must_equal(str((await sandbox.stat("link", follow=False)).kind), "link", "the link itself")
        must(await sandbox.exists("dangling"), "a link that leads nowhere is said not to exist")
        walked = [info.path async for info in sandbox.walk()]
        must_equal(
            sorted(walked),
            ["a", "a/deep", "a/deep/er", "b", "b/file", "b/loop", "dangling", "link", "pipe"],
            "what walk finds",
        )
        must(walked.index("a") < walked.index("a/deep") < walked.index("a/deep/er"), "children come before parents")
        below = sorted([info.path async for info in sandbox.walk("b")])
        must_equal(below, ["file", "loop"], "what walk finds in a directory")


@check()
async def moving_replaces(bench: Bench) -> None:
    """Files and directories are renamed, parents of the target are made, an existing file is replaced."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("one", "1")
        await sandbox.write_file("two", "2")
        await sandbox.move("one", "two")
        must_equal(await sandbox.read_file("two"), "1", "the content after a move over a file")
        must(not await sandbox.exists("one"), "the file is still in its old place")
        await sandbox.move("two", "new/place/file")
        must_equal(await sandbox.read_file("new/place/file"), "1", "the content in a new directory")
        await sandbox.move("new", "renamed")
        must_equal(await sandbox.read_file("renamed/place/file"), "1", "the content in a renamed directory")


@check()
async def links_are_followed_only_where_they_should_be(bench: Bench) -> None:
    """Reading and writing go through them as any program's would; removing takes the link, never its target."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("real/file", "content")
        await sandbox.exec("ln -s real/file link; ln -s real dirlink; ln -s loop loop", timeout=10)
        must_equal(await sandbox.read_file("link"), "content", "what is read through a link")
        must_equal([info.path for info in await sandbox.list_files("dirlink")], ["file"], "what is listed through one")
        await sandbox.remove("link")
        await sandbox.remove("dirlink")
        must_equal(await sandbox.read_file("real/file"), "content", "the target of links that were removed")
        await refusal(sandbox.read_file("loop"), OSError, "reading a link to itself")


@check()
async def any_tree_can_be_removed(bench: Bench) -> None:
    """Deep ones, wide ones and those without permissions; links that lead out of it are not followed."""
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("outside/kept", "x")
        deep = "/".join(["d" * 200] * 19)
        script = (
            "mkdir -p tree/locked/in; touch tree/locked/in/file; ln -s ../outside tree/link; mkfifo tree/pipe;"
            "i=0; while [ $i -lt 500 ]; do : > tree/f$i; i=$((i+1)); done;"
            # Deeper than the longest possible path, created from two parts that are short enough.
            f"mkdir -p tree/{deep} lower/{deep} && mv lower tree/{deep}"
        )
        made = await sandbox.exec(script, timeout=30)
        must_equal(made.exit_code, 0, f"making the tree ({made.stderr[:200]})")
        await sandbox.exec("chmod 000 tree/locked/in tree/locked", timeout=10)
        await sandbox.remove("tree")
        must(not await sandbox.exists("tree"), "the tree is still there")
        must_equal(await sandbox.read_file("outside/kept"), "x", "what a link in the tree led to")


@check()
async def many_operations_run_at_once(bench: Bench) -> None:
    """A hundred writes and reads side by side, each with its own content."""
    async with bench.sandbox() as sandbox:

        async def turn(number: int) -> None:
            content = bytes([number]) * (number * 1000)
            await sandbox.write_file(f"many/{number}", content)
            must(await sandbox.read_bytes(f"many/{number}") == content, f"file {number} is not what was written")

        await asyncio.gather(*(turn(number) for number in range(100)))
        must_equal(len(await sandbox.list_files("many")), 100, "the number of files")
