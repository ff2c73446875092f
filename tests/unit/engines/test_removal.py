from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll import removal
from atoll.removal import remove_tree
from user_switch import as_user


def test_a_missing_tree_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "nothing")
    remove_tree(tmp_path / "no" / "parent")


def test_a_file_and_a_link_are_removed_and_the_target_stays(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    remove_tree(tmp_path / "link")
    assert os.listdir(tmp_path) == ["target"]
    assert (tmp_path / "target" / "precious").exists()


def test_links_inside_are_never_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").touch()
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "absolute").symlink_to(tmp_path / "target")
    (tmp_path / "tree" / "deep" / "relative").symlink_to("../../target")
    (tmp_path / "tree" / "deep" / "dangling").symlink_to("/nonexistent")
    remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == ["target"]
    assert (tmp_path / "target" / "precious").exists()


def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    fd = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d" * 100, dir_fd=fd)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == []


def test_odd_names_and_kinds_are_removed(tmp_path: Path) -> None:
    tree = os.fsencode(tmp_path / "tree")
    os.makedirs(tree + b"/\xff\xfe\n")
    for name in (b"\xff", b" ", b"-rf", b"a\nb", b"*", b"0", b"1", b".removing-0"):
        open(tree + b"/" + name, "w").close()
        open(tree + b"/\xff\xfe\n/" + name, "w").close()
    os.mkfifo(tree + b"/fifo")
    remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == []


def test_more_entries_than_one_listing_takes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "_BATCH", 16)
    for number in range(500):
        (tmp_path / f"tree/{number % 10}/{number}").mkdir(parents=True)
    remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == []


def test_directories_without_permissions_are_removed_without_being_root(open_folder: Path) -> None:
    top = open_folder / "top"
    (top / "tree/closed/inner").mkdir(parents=True)
    (top / "tree/closed/inner/file").touch()
    (top / "tree/readonly/inner").mkdir(parents=True)
    (top / "tree/readonly/file").touch()
    for path in ("tree/closed/inner", "tree/closed", "tree/readonly", "tree"):
        (top / path).chmod(0o500 if path.endswith("readonly") else 0)

    as_user(top, lambda: remove_tree(top / "tree"))
    assert os.listdir(top) == []


def test_what_a_crashed_removal_left_is_removed_as_any_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top/tree/deep/deeper").mkdir(parents=True)
    with monkeypatch.context() as broken:
        broken.setattr(os, "rmdir", _fail)
        with pytest.raises(OSError, match="power cut"):
            remove_tree(tmp_path / "top/tree")
    for name in os.listdir(tmp_path / "top"):
        remove_tree(tmp_path / "top" / name)
    assert os.listdir(tmp_path / "top") == []


def _fail(*_: object, **__: object) -> None:
    raise OSError("power cut")
