"""Differences between states of containers have a bounded price, however much was written inside."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from atoll.engines.docker.states import tree_difference
from atoll.engines.host import saved_states
from atoll.model.checkpoint import ChangeKind


def tree(file: Path, **files: bytes) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"w/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def test_texts_are_told_line_by_line(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", same=b"x", text=b"one\ntwo\n", gone=b"1\n", raw=b"\0")
    new = tree(tmp_path / "new", same=b"x", text=b"one\nthree\n", more=b"new", raw=b"\0\0")
    found = {change.path: change for change in tree_difference.changes(old, new, text=True)}
    assert {path: change.kind for path, change in found.items()} == {
        "/w/text": ChangeKind.CHANGED,
        "/w/gone": ChangeKind.REMOVED,
        "/w/more": ChangeKind.ADDED,
        "/w/raw": ChangeKind.CHANGED,
    }
    assert found["/w/text"].text == "--- a/w/text\n+++ b/w/text\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    assert found["/w/more"].text == "--- a/w/more\n+++ b/w/more\n@@ -0,0 +1 @@\n+new\n"
    assert found["/w/raw"].text is found["/w/gone"].text is None


def test_so_much_text_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_difference, "MAX_DIFFERENCES", 10_000)
    many = {f"f{number:03}": b"line\n" * 100 for number in range(100)}
    found = tree_difference.changes(tree(tmp_path / "old"), tree(tmp_path / "new", **many), text=True)
    assert len(found) == 100
    assert 1 <= len([change for change in found if change.text]) <= 20
    assert found[-1].text is None


def test_lines_without_end_are_not_compared() -> None:
    assert saved_states.lines_of(b"\n" * 6_000) is None
    assert saved_states.lines_of(b"x" * (saved_states.MAX_TEXT + 1)) is None
    assert saved_states.lines_of(b"\xff") is None
    assert saved_states.lines_of(b"a\nb") == ["a\n", "b"]
