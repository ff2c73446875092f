"""Files and trees copied between the host and a sandbox."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from atoll.conformance.bench import Bench
from atoll.conformance.check import check
from atoll.conformance.files import ODD_NAMES
from atoll.conformance.findings import must, must_equal, refusal

Seen = dict[str, tuple[str, int, str | bytes | None]]


def _make_tree(top: Path) -> None:
    (top / "empty/in empty").mkdir(parents=True)
    (top / "sub/deep").mkdir(parents=True)
    for name, mode in {"plain": 0o644, "private": 0o600, "script": 0o755, "readonly": 0o444, "none": 0o200}.items():
        (top / "sub" / name).write_bytes(name.encode() * 10)
        (top / "sub" / name).chmod(mode)
    (top / "zero").touch()
    (top / "large").write_bytes(os.urandom(1 << 16) * 20)
    for number, name in enumerate(ODD_NAMES):
        (top / "sub/deep" / name).write_text(str(number))
    for name, target in {
        "to-file": "sub/plain",
        "to-dir": "sub",
        "nowhere": "no/such",
        "absolute": "/etc/hostname",
    }.items():
        (top / name).symlink_to(target)
    (top / "sub/up").symlink_to("../..")
    for number in range(300):
        (top / "sub" / f"small-{number}").write_text(f"content {number}")
    (top / "sub/deep").chmod(0o750)
    (top / "empty").chmod(0o700)


def _look(top: Path) -> Seen:
    """Return kind, mode and content of everything in a tree of the host."""
    seen: Seen = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(folder, name)
            found = path.lstat()
            key = os.fspath(path.relative_to(top))
            if stat.S_ISLNK(found.st_mode):
                seen[key] = ("link", 0, os.readlink(path))
            elif stat.S_ISDIR(found.st_mode):
                seen[key] = ("directory", stat.S_IMODE(found.st_mode), None)
            else:
                mode = stat.S_IMODE(found.st_mode)
                if not mode & 0o400:
                    path.chmod(mode | 0o400)
                seen[key] = ("file", mode, path.read_bytes())
    return seen


@check()
async def a_tree_comes_back_as_it_was(bench: Bench) -> None:
    """Content, modes, empty directories, links and odd names survive the way in and out."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        source = folder / "source"
        _make_tree(source)
        if os.geteuid() != 0:
            (source / "sub/none").chmod(0o600)
        await sandbox.copy_to(source, "tree")
        must_equal((await sandbox.stat("tree/sub/script")).mode, 0o755, "the mode of a script inside")
        must_equal(await sandbox.read_bytes("tree/sub/plain"), b"plain" * 10, "the content inside")
        must_equal((await sandbox.stat("tree/absolute", follow=False)).target, "/etc/hostname", "a link inside")
        await sandbox.exec("chmod u+r tree/sub/none", timeout=10)
        await sandbox.copy_from("tree", folder / "back")
        before, after = _look(source), _look(folder / "back")
        before["sub/none"] = ("file", before["sub/none"][1] | 0o400, before["sub/none"][2])
        must_equal(sorted(after), sorted(before), "the names that came back")
        for name, value in before.items():
            must_equal(after[name], value, f"what came back of {name!r}")


@check()
async def times_are_kept(bench: Bench) -> None:
    """The time of the last change travels with a file."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        (folder / "tree").mkdir()
        (folder / "tree/file").write_text("x")
        os.utime(folder / "tree/file", (1_000_000_000, 1_000_000_000))
        await sandbox.copy_to(folder / "tree", "tree")
        must_equal(int((await sandbox.stat("tree/file")).mtime_s), 1_000_000_000, "the time inside")
        await sandbox.copy_from("tree", folder / "back")
        must_equal(int((folder / "back/file").stat().st_mtime), 1_000_000_000, "the time outside")


@check()
async def one_file_goes_where_it_is_told(bench: Bench) -> None:
    """To the target, or into it if that is a directory or ends with a slash; parents are made."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        (folder / "file").write_text("content")
        await sandbox.copy_to(folder / "file", "new/name")
        await sandbox.copy_to(str(folder / "file"), "made/")
        await sandbox.make_dir("there")
        await sandbox.copy_to(folder / "file", "there")
        for path in ("new/name", "made/file", "there/file"):
            must_equal(await sandbox.read_file(path), "content", f"the content of {path!r}")
        (folder / "target").mkdir()
        await sandbox.copy_from("new/name", folder / "target")
        await sandbox.copy_from("new/name", folder / "as")
        for copied in (folder / "target/name", folder / "as"):
            must_equal(copied.read_text(), "content", f"the content of {copied.name!r} on the host")
        await sandbox.write_file("new/name", "changed")
        await sandbox.copy_from("new/name", folder / "as")
        must_equal((folder / "as").read_text(), "changed", "a file that was copied over")


@check()
async def copying_twice_replaces(bench: Bench) -> None:
    """Into a tree that exists: files of the same name are replaced, others stay."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        (folder / "tree").mkdir()
        (folder / "tree/a").write_text("1")
        await sandbox.copy_to(folder / "tree", "tree")
        await sandbox.write_file("tree/other", "stays")
        (folder / "tree/a").write_text("2")
        await sandbox.copy_to(folder / "tree", "tree")
        must_equal(await sandbox.read_file("tree/a"), "2", "the replaced file")
        must_equal(await sandbox.read_file("tree/other"), "stays", "the other file")


@check()
async def links_are_never_followed_on_the_host(bench: Bench) -> None:
    """A sandbox that plants links and then replaces them by files and directories cannot write through them."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        victim = folder / "victim"
        victim.mkdir()
        (victim / "file").write_text("untouched")
        script = 'mkdir tree; ln -s "$0" tree/dir; ln -s "$0/file" tree/file; ln -s "$0/new" tree/new'
        await sandbox.exec(["sh", "-c", script, str(victim)], timeout=10)
        await sandbox.copy_from("tree", folder / "out")
        must((folder / "out/dir").is_symlink() and (folder / "out/file").is_symlink(), "links do not come as links")
        script = "rm dir file new; mkdir dir; for name in dir/file dir/more file new; do echo evil >$name; done"
        await sandbox.exec(script, cwd="tree", timeout=10)
        with contextlib.suppress(OSError):  # a refusal is as acceptable as replacing the links
            await sandbox.copy_from("tree", folder / "out")
        must_equal((victim / "file").read_text(), "untouched", "the file that the link led to")
        must_equal([path.name for path in victim.iterdir()], ["file"], "the directory that the link led to")


@check()
async def a_link_as_the_source_gives_nothing_of_the_host(bench: Bench) -> None:
    """Links in a tree of the host are copied as links; what they lead to stays outside."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        (folder / "secret").write_text("secret")
        (folder / "tree").mkdir()
        (folder / "tree/link").symlink_to(folder / "secret")
        await sandbox.copy_to(folder / "tree", "tree")
        must_equal(str((await sandbox.stat("tree/link", follow=False)).kind), "link", "the kind of the copied link")


@check()
async def dangerous_modes_are_not_kept(bench: Bench) -> None:
    """Nothing from a sandbox becomes set-uid or set-gid on the host."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        await sandbox.write_file("tree/program", "x", mode=0o755)
        await sandbox.exec("chmod 6755 tree/program; chmod 2755 tree", timeout=10)
        await sandbox.copy_from("tree", folder / "out")
        must_equal(stat.S_IMODE((folder / "out/program").stat().st_mode), 0o755, "the mode on the host")
        must_equal(stat.S_IMODE((folder / "out").stat().st_mode) & 0o6000, 0, "the mode of the directory on the host")


@check()
async def what_cannot_be_copied_is_named(bench: Bench) -> None:
    """A missing source is FileNotFoundError with its name, and nothing is made in its place."""
    async with bench.folder() as folder, bench.sandbox() as sandbox:
        error = await refusal(sandbox.copy_to(folder / "missing", "x"), FileNotFoundError, "a missing source")
        must("missing" in str(error), f"the error does not name it: {error}")
        must(not await sandbox.exists("x"), "something was made inside")
        error = await refusal(sandbox.copy_from("missing", folder / "x"), FileNotFoundError, "a missing source inside")
        must("missing" in str(error), f"the error does not name it: {error}")
        must(not (folder / "x").exists(), "something was made on the host")
