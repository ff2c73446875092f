"""The parts of a build that need no sandbox: what is selected, hidden, known and swept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.builds.archives import private_directory, sweep_drafts
from atoll.builds.dockerfile.ignore import IgnoreRules
from atoll.builds.dockerfile.instructions import Instruction, Place
from atoll.builds.known_digests import FileVersion, KnownDigests
from atoll.builds.renewals import Renewals, remove_unused
from atoll.builds.reporting import MAX_OUTPUT_BYTES, TAIL_BYTES, Reporter
from atoll.builds.request import BuildEvent
from atoll.builds.source_tree import Entry, SourceTree
from atoll.builds.steps import MakeDirectory, Step, key_of
from atoll.errors import BuildError


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[SourceTree]:
    for name in ("a.txt", "b.txt", "dir/c.txt", "dir/d.md", "dir/deep/e.txt"):
        path = tmp_path / "context" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    root = os.open(tmp_path / "context", os.O_RDONLY | os.O_DIRECTORY)
    yield SourceTree(root, "the context")
    os.close(root)


def below(tree: SourceTree, pattern: str, rules: str = "") -> list[str]:
    tree.rules = IgnoreRules.parse(rules.encode())
    return [
        "/".join(filter(None, (source.name.decode(), entry.below.decode())))
        for source in tree.select(pattern)
        for entry in source.entries
    ]


def test_sources_are_selected_by_name_and_by_pattern(tree: SourceTree) -> None:
    assert below(tree, "*.txt") == ["a.txt", "b.txt"]
    assert below(tree, "d*/?.txt") == ["c.txt"]
    assert below(tree, "dir") == ["dir", "dir/c.txt", "dir/d.md", "dir/deep", "dir/deep/e.txt"]
    assert below(tree, "../../dir/deep") == ["deep", "deep/e.txt"]
    with pytest.raises(BuildError, match="there is no 'none'"):
        below(tree, "none")


def test_what_is_ignored_is_not_selected(tree: SourceTree) -> None:
    assert below(tree, "*.txt", "a.*") == ["b.txt"]
    assert below(tree, "dir", "dir\n!dir/deep") == ["dir", "dir/deep", "dir/deep/e.txt"]
    assert below(tree, ".", "*\n!b.txt") == ["", "b.txt"]
    with pytest.raises(BuildError, match=r"there is no 'a\.txt'"):
        below(tree, "a.txt", "*.txt")


def test_a_digest_is_of_names_modes_and_contents(tree: SourceTree, tmp_path: Path) -> None:
    def digest() -> bytes:
        return tree.digest(tree.select("dir"))

    before = digest()
    file = tmp_path / "context" / "dir" / "c.txt"
    os.utime(file, (5, 5))
    assert digest() == before
    file.chmod(0o600)
    changed = digest()
    file.chmod(0o644)
    assert changed != before == digest()
    file.write_text("DIR/c.txt")
    assert digest() != before
    file.write_text("dir/c.txt")
    file.rename(file.with_name("other"))
    assert digest() != before


def test_only_settled_large_files_are_known(tree: SourceTree, tmp_path: Path) -> None:
    large, small = tmp_path / "context" / "large", tmp_path / "context" / "small"
    large.write_bytes(b"x" * 100_000)
    small.write_bytes(b"x")
    tree.known = KnownDigests(tmp_path / "known" / "one")
    now = time.time_ns()
    (entry,) = tree.select("large")[0].entries
    for read_at, expected in ((now, False), (now + 10_000_000_000, True)):
        tree.known.add(version := _version(entry), b"d" * 32, read_at)
        assert (tree.known.of(version) is not None) is expected
    tree.known.save()
    again = KnownDigests(tmp_path / "known" / "one")
    again.load()
    assert again.of(_version(entry)) == b"d" * 32
    large.write_bytes(b"y" * 100_000)
    (changed,) = tree.select("large")[0].entries
    assert again.of(_version(changed)) is None
    (tmp_path / "known" / "one").write_text('{"1 2": 3, "1 2 3 4 5": "z"}')
    again.load()
    assert again.of(_version(changed)) is None


def _version(entry: Entry) -> FileVersion:

    return FileVersion(*entry.identity, entry.mtime_ns, entry.size)


def step() -> Step:
    place = Place("Dockerfile", 1)
    return Step(1, "one", place, Instruction(place, "RUN x").text, MakeDirectory("/"), key_of("x"))


def reported(pieces: list[bytes], secrets: list[bytes]) -> tuple[str, str]:
    events: list[BuildEvent] = []
    output = Reporter(events.append, secrets).output_of(step())
    for piece in pieces:
        output.add(1, piece)
    last = output.finish()
    return "".join(event.text for event in events), last


@pytest.mark.parametrize("cut", range(1, 18))
def test_a_secret_is_hidden_however_it_is_cut(cut: int) -> None:
    text = b"a sec-sec-secret b"
    shown, last = reported([text[:cut], text[cut:]], [b"sec-secret", b"abc"])
    assert shown == last == "a sec-*** b"


def test_output_is_bounded_and_its_end_is_kept() -> None:
    shown, last = reported([b"x" * 100_000] * 50 + [b"end"], [])
    assert MAX_OUTPUT_BYTES <= len(shown) <= MAX_OUTPUT_BYTES + 200
    assert last.endswith("xend")
    assert len(last) == TAIL_BYTES


def test_a_character_that_is_cut_is_whole() -> None:
    assert reported(["é".encode()[:1], "é".encode()[1:]], [])[0] == "é"


def test_drafts_of_the_living_are_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "left"
    left.mkdir()
    with private_directory(tmp_path) as ours:
        sweep_drafts(tmp_path)
        assert left.exists()  # it is new: its maker may not have locked it yet
        monkeypatch.setattr("atoll.builds.archives._NEW_S", -1.0)
        sweep_drafts(tmp_path)
        assert ours.exists()
        assert not left.exists()
    assert not ours.exists()


def test_a_renewal_is_kept_until_nobody_uses_it(tmp_path: Path) -> None:
    renewals, key = Renewals(tmp_path / "renewals"), key_of("first")
    assert renewals.of(key) == ""
    renewals.keep(key, "0" * 32)
    assert renewals.of(key) == "0" * 32
    remove_unused(tmp_path / "renewals")
    assert renewals.of(key) == "0" * 32
    os.utime(tmp_path / "renewals" / key, (1, 1))
    remove_unused(tmp_path / "renewals")
    assert renewals.of(key) == ""
