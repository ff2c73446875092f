"""Differences of texts are correct, readable, and take time that grows with the texts only."""

from __future__ import annotations

import difflib
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.engines.host import saved_states
from atoll.engines.host.line_diff import matching_blocks, unified_diff
from atoll.engines.linux.states import overlay_diff
from atoll.model.checkpoint import Omitted
from atoll.workers import Cancellation, WorkCancelledError

QUICK_S = 2.0


def edited(lines: list[str], choice: random.Random, words: int) -> list[str]:
    lines = list(lines)
    for _ in range(choice.randint(0, 8)):
        if lines and choice.random() < 0.5:
            del lines[choice.randrange(len(lines))]
        else:
            lines.insert(choice.randint(0, len(lines)), f"{choice.randint(0, words)}\n")
    return lines


@pytest.mark.parametrize("words", [2, 5, 50])
def test_what_matches_is_the_same_and_in_order(words: int) -> None:
    choice = random.Random(words)
    for _ in range(300):
        old = [f"{choice.randint(0, words)}\n" for _ in range(choice.randint(0, 30))]
        new = edited(old, choice, words)
        i = j = 0
        for start, other, length in matching_blocks(old, new):
            assert length > 0
            assert start >= i
            assert other >= j
            assert old[start : start + length] == new[other : other + length]
            i, j = start + length, other + length


def test_patch_makes_one_of_the_other(tmp_path: Path) -> None:
    choice = random.Random(7)
    for _ in range(30):
        old = [f"{choice.randint(0, 9)}\n" for _ in range(20)]
        new = edited(old, choice, 9)
        if old == new:
            continue
        (tmp_path / "file").write_text("".join(old))
        (tmp_path / "patch").write_text(unified_diff(old, new, "file"))
        command = ["patch", "-s", "-o", "-", str(tmp_path / "file"), str(tmp_path / "patch")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "".join(new)


def test_a_small_change_looks_as_everywhere_else() -> None:
    old = [f"line {number}\n" for number in range(40)]
    new = [*old[:10], "new\n", *old[10:30], *old[31:]]
    wanted = "".join(difflib.unified_diff(old, new, "a/x", "b/x"))
    assert unified_diff(old, new, "x") == wanted


@pytest.mark.parametrize("kind", ["alternating", "few words", "reversed", "all the same"])
def test_hostile_texts_take_no_time(kind: str) -> None:
    choice = random.Random(1)
    size = 5_000
    kinds: dict[str, Callable[[], list[str]]] = {
        "alternating": lambda: [f"{number % 2}\n" for number in range(size)],
        "few words": lambda: [f"{choice.randint(0, 3)}\n" for _ in range(size)],
        "reversed": lambda: [f"{number}\n" for number in range(size)],
        "all the same": lambda: ["a\n"] * size,
    }
    old, new = kinds[kind](), kinds[kind]()[::-1] if kind == "reversed" else kinds[kind]()[1:]
    began = time.thread_time()
    unified_diff(old, new, "x")
    assert time.thread_time() - began < QUICK_S


def test_texts_beyond_the_budget_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (new / "binary").write_bytes(b"\0")
    (new / "large").write_text("x" * (300 << 10))
    (new / "text").write_text("a\n")
    (new / "directory").mkdir()
    found = {change.path: change.omitted for change in overlay_diff.changes(old, new, [], text=True)}
    assert found == {"/binary": Omitted.BINARY, "/large": Omitted.SIZE, "/text": None, "/directory": None}
    monkeypatch.setattr(saved_states, "TEXT_S", -1.0)
    late = {change.path: change.omitted for change in overlay_diff.changes(old, new, [], text=True)}
    assert late["/text"] is Omitted.TIME
    assert all(change.omitted is None for change in overlay_diff.changes(old, new, []))


def test_a_comparison_ends_when_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(WorkCancelledError):
        overlay_diff.changes(tmp_path, tmp_path, [], cancellation=cancellation)
    monkeypatch.setattr(saved_states, "COMPARE_S", -1.0)
    with pytest.raises(OverflowError, match="comparing took more"):
        overlay_diff.changes(tmp_path, tmp_path, [])
