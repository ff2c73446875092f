"""The layer of copies over the host's /usr."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.engines.linux.host_image import host_copies
from atoll.engines.linux.host_image.host_copies import copies, number_of


@pytest.fixture
def usr(tmp_path: Path) -> Path:
    usr = tmp_path / "usr"
    lib = usr / "lib" / f"{os.uname().machine}-linux-gnu"
    lib.mkdir(parents=True)
    (usr / "bin").mkdir()
    (lib / "libc.so.6").write_text("libc")
    (lib / "libz.so.1.2").write_text("libz")
    (lib / "libz.so.1").symlink_to("libz.so.1.2")
    (usr / "bin/dash").write_text("dash")
    (usr / "bin/dash").chmod(0o755)
    (usr / "bin/sh").symlink_to("dash")
    return usr


def files(top: Path) -> set[str]:
    return {path.name for path in top.rglob("*") if not path.is_dir()}


def test_what_is_copied_is_the_same_in_another_file(tmp_path: Path, usr: Path) -> None:
    found = copies(tmp_path / "copies", 0, usr)
    assert files(found) == {"libc.so.6", "libz.so.1.2", "dash"}
    for path in found.rglob("*"):
        source = usr / path.relative_to(found)
        assert path.stat().st_mode == source.stat().st_mode
        if path.is_file():
            assert path.read_bytes() == source.read_bytes()
            assert path.stat().st_mtime_ns == source.stat().st_mtime_ns
            assert path.stat().st_ino != source.stat().st_ino
    assert copies(tmp_path / "copies", 0, usr) == found, "made once"
    other = copies(tmp_path / "copies", 1, usr)
    assert next(other.rglob("dash")).stat().st_ino != next(found.rglob("dash")).stat().st_ino


def test_what_others_may_not_read_or_runs_as_somebody_else_is_not_copied(tmp_path: Path, usr: Path) -> None:
    (usr / "bin/dash").chmod(0o750)
    (usr / "bin/bash").write_text("bash")
    (usr / "bin/bash").chmod(0o4755)
    secret = tmp_path / "secret"
    secret.write_text("not of /usr")
    (usr / "bin/python3").symlink_to(secret)
    assert files(copies(tmp_path / "copies", 0, usr)) == {"libc.so.6", "libz.so.1.2"}


def test_a_change_of_the_host_makes_new_copies(tmp_path: Path, usr: Path) -> None:
    before = copies(tmp_path / "copies", 0, usr)
    (usr / "bin/dash").write_text("another")
    after = copies(tmp_path / "copies", 0, usr)
    assert next(before.rglob("dash")).read_text() == "dash", "sandboxes that run keep theirs"
    assert next(after.rglob("dash")).read_text() == "another"
    assert not [path for path in (tmp_path / "copies").iterdir() if path.name.startswith(".")]


def test_accounts_are_spread_and_the_one_without_a_name_is_alone() -> None:
    numbers = {number_of(f"user-{number}") for number in range(200)}
    assert numbers == set(range(1, host_copies.SETS))
    assert number_of("") == 0
