"""What is installed in an image is read from its tree, which is not trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from atoll.errors import ImageError
from atoll.images import contents
from atoll.images.contents import Contents, Package, read_contents

STATUS = """Package: bash
Status: install ok installed
Version: 5.2-1
Architecture: amd64
Description: a shell
 Version: 9

Package: gone
Status: deinstall ok config-files
Version: 1

Package: bad name
Status: install ok installed
Version: 1
"""


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def read(root: Path) -> Contents:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return read_contents(fd)
    finally:
        os.close(fd)


def test_packages_of_three_kinds_are_found_wherever_they_are(tmp_path: Path) -> None:
    put(tmp_path, "var/lib/dpkg/status", STATUS)
    put(tmp_path, "usr/lib/os-release", 'ID=debian\nVERSION_ID="13"\n')
    put(tmp_path, "opt/env/lib/python3/site-packages/A_b-1.2.dist-info/METADATA", "Name: A_b\nVersion: 1.2\n\nName: x")
    put(tmp_path, "usr/lib/python3/dist-packages/old.egg-info", "Name: old\nVersion: 3\n")
    put(tmp_path, "opt/node_modules/left/package.json", json.dumps({"name": "left", "version": "1.0.0"}))
    put(tmp_path, "opt/node_modules/@a/b/package.json", json.dumps({"name": "@a/b", "version": "2.0.0"}))
    put(tmp_path, "home/project/package.json", json.dumps({"name": "project", "version": "1.0.0"}))
    assert read(tmp_path) == Contents(
        (
            Package("debian", "bash", "5.2-1", "amd64"),
            Package("npm", "@a/b", "2.0.0"),
            Package("npm", "left", "1.0.0"),
            Package("pypi", "A_b", "1.2"),
            Package("pypi", "old", "3"),
        ),
        "debian",
        "13",
    )


def test_no_link_is_followed_and_nothing_but_files_is_opened(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    put(outside, "x-1.dist-info/METADATA", "Name: x\nVersion: 1\n")
    put(outside, "status", STATUS)
    (root / "var/lib/dpkg").mkdir(parents=True)
    (root / "var/lib/dpkg/status").symlink_to(outside / "status")
    (root / "linked").symlink_to(outside)
    (root / "y-1.dist-info").mkdir()
    (root / "y-1.dist-info/METADATA").symlink_to(outside / "x-1.dist-info/METADATA")
    (root / "z-1.dist-info").mkdir()
    os.mkfifo(root / "z-1.dist-info/METADATA")
    assert read(root).packages == ()


@pytest.mark.parametrize("text", ["{", "[1]", '{"name": 1, "version": "1"}', '{"name": "a\\u0007", "version": "1"}'])
def test_what_is_malformed_is_left_out(tmp_path: Path, text: str) -> None:
    put(tmp_path, "node_modules/bad/package.json", text)
    put(tmp_path, "node_modules/good/package.json", '{"name": "good", "version": "1.0.0"}')
    assert [package.name for package in read(tmp_path).packages] == ["good"]


def test_files_and_depth_are_bounded(tmp_path: Path) -> None:
    put(tmp_path, "big-1.dist-info/METADATA", "Name: big\nVersion: 1\n" + "x" * (2 << 20))
    place = tmp_path
    for _ in range(80):
        place = place / "d"
    put(place, "deep-1.dist-info/METADATA", "Name: deep\nVersion: 1\n")
    assert read(tmp_path).packages == ()


def test_a_tree_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_MAX_ENTRIES", 20)
    for number in range(30):
        put(tmp_path, f"file-{number}", "")
    with pytest.raises(ImageError, match="too many"):
        read(tmp_path)
