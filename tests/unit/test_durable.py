"""A file is as before or as meant, and drafts of dead writers are found."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll import durable


def test_a_file_is_replaced_with_exactly_this_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    before = os.umask(0o077)
    try:
        durable.write(path, "after", 0o644)
    finally:
        os.umask(before)
    assert path.read_text() == "after"
    assert path.stat().st_mode & 0o777 == 0o644
    durable.write(path, b"secret", sync=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        durable.write(path, "text")
    with pytest.raises(FileNotFoundError):
        durable.write(tmp_path / "missing/file", "text")
    with contextlib.suppress(ZeroDivisionError), durable.draft(tmp_path / "file") as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["directory"]


def test_of_several_who_make_a_file_one_succeeds(tmp_path: Path) -> None:
    path, made = tmp_path / "file", []
    threads = [
        threading.Thread(target=lambda text=text: made.append((durable.create(path, text), text)))
        for text in "abcdefgh"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text for succeeded, text in made if succeeded] == [path.read_text()]
    assert os.listdir(tmp_path) == ["file"]


def test_a_draft_appears_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with durable.draft(path) as draft:
        draft.write_text("content")
        assert not path.exists()
        assert durable.abandoned(tmp_path) == []  # the writer lives
    assert path.read_text() == "content"
    assert os.listdir(tmp_path) == ["file"]


def test_a_draft_of_a_killed_writer_is_found_under_the_name_of_what_it_was_to_become(tmp_path: Path) -> None:
    program = "import os, sys; from atoll import durable; from pathlib import Path\n"
    program += "with durable.draft(Path(sys.argv[1])) as draft: draft.write_text('half'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "record.json")])
    [found] = durable.abandoned(tmp_path)
    assert (found.name, found.path.read_text()) == ("record.json", "half")
    durable.remove_abandoned(tmp_path)
    assert os.listdir(tmp_path) == []


def test_drafts_of_earlier_versions_are_found_and_nothing_else(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = [f".sb-1.{dead.pid}", f".a.b.0123abcd.{dead.pid}"]
    kept = [f".mine.{os.getpid()}", ".hidden", ".pool.btrfs.draft", f"file.{dead.pid}", ".x.12-34"]
    for name in (*names, *kept):
        (tmp_path / name).mkdir()
    assert {each.name for each in durable.abandoned(tmp_path)} == {"sb-1", "a.b"}
    durable.remove_abandoned(tmp_path, os.rmdir)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert durable.abandoned(tmp_path / "missing") == []


def test_a_directory_appears_as_a_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "directory"

    def make(draft: Path) -> None:
        draft.mkdir()
        (draft / "file").write_text("first")
        assert not path.exists()

    durable.directory_once(path, make)
    durable.directory_once(path, lambda draft: pytest.fail("it is there"))
    assert (path / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["directory"]


def test_who_is_slower_to_make_a_directory_keeps_the_work_of_the_faster(tmp_path: Path) -> None:
    path = tmp_path / "directory"

    def make(draft: Path) -> None:
        draft.mkdir()
        path.mkdir()
        (path / "file").write_text("faster")

    durable.directory_once(path, make)
    assert (path / "file").read_text() == "faster"
    assert os.listdir(tmp_path) == ["directory"]
