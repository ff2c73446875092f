"""The price of a difference is bounded, whatever was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.engines.linux.states import overlay_diff
from atoll.removal import remove_tree
from deep_trees import make_deep


@pytest.fixture
def layers(tmp_path: Path) -> tuple[Path, Path]:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    return old, new


def test_texts_that_are_too_long_are_told_without_them(layers: tuple[Path, Path]) -> None:
    old, new = layers
    (new / "short").write_text("a\n")
    (new / "large").write_text("x" * (300 << 10))
    (new / "lines").write_text("\n" * 6_000)
    seen = {change.path: change.text for change in overlay_diff.changes(old, new, [], text=True)}
    assert seen == {"/short": "--- a/short\n+++ b/short\n@@ -0,0 +1 @@\n+a\n", "/large": None, "/lines": None}


def test_all_texts_together_are_bounded(layers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay_diff, "MAX_DIFFERENCES", 1_000)
    old, new = layers
    for number in range(10):
        (new / f"{number}").write_text("x" * 400)
    texts = [change.text for change in overlay_diff.changes(old, new, [], text=True)]
    assert [text is not None for text in texts] == [True] * 3 + [False] * 7


def test_too_many_files_are_refused(layers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay_diff, "MAX_ENTRIES", 5)
    old, new = layers
    for number in range(6):
        (new / f"{number}").touch()
    with pytest.raises(OverflowError, match="more than 5"):
        overlay_diff.changes(old, new, [])


@pytest.mark.usefixtures("few_descriptors")
def test_a_level_of_many_directories_takes_few_descriptors(layers: tuple[Path, Path]) -> None:
    _, new = layers
    for number in range(500):
        (new / f"{number:03}").mkdir()
    assert len(overlay_diff.changes(*layers, [])) == 500


@pytest.mark.usefixtures("few_descriptors")
def test_a_deep_tree_is_compared_or_refused(layers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, new = layers
    make_deep(new, 500, b"d" * 10)
    assert len(overlay_diff.changes(*layers, [])) == 500
    monkeypatch.setattr(overlay_diff, "MAX_NAMES", 1 << 20)
    with pytest.raises(OverflowError, match="paths"):
        overlay_diff.changes(*layers, [])
    remove_tree(new)


def test_a_state_in_which_nothing_was_written_yet_is_compared(layers: tuple[Path, Path]) -> None:
    old, new = layers
    old.rmdir()
    (new / "file").touch()
    assert [str(change) for change in overlay_diff.changes(old, new, [])] == ["A /file"]
