from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.engines.host.process_ref import ProcessRef, boot_id
from atoll.engines.process_tree.process_record import Record, Records
from atoll.errors import SpecError
from atoll.model import SandboxSpec


def record(sandbox_id: str = "x", boot: str | None = None) -> Record:
    return Record(
        sandbox_id=sandbox_id,
        engine="bubblewrap",
        installation="i",
        spec=SandboxSpec.of(env={"A": "ü"}, volumes=[{"host": "/a", "path": "/b"}], limits={"open_files": 99}),
        created_at=1.5,
        boot_id=boot or boot_id(),
        creator=ProcessRef(1, 2),
        init=ProcessRef(3, 4),
        monitor=ProcessRef(5, 6),
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.home("x").mkdir()
    records.write(record())
    assert records.read("x") == record()
    assert records.ids() == ["x"]
    assert (tmp_path / "x/record.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "x") == ["record.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff", b'{"version": 2}'])
def test_a_damaged_record_is_no_record_but_the_sandbox_is_still_found(tmp_path: Path, content: bytes) -> None:
    records = Records(tmp_path)
    records.home("x").mkdir()
    (tmp_path / "x/record.json").write_bytes(content)
    assert records.read("x") is None
    assert records.exists("x")
    assert records.ids() == ["x"]


def test_what_is_not_a_sandbox_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".base").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/")
    assert Records(tmp_path).ids() == []
    assert Records(tmp_path / "missing").ids() == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "A", "-a", ".a", "a" * 41, "a\n", "a\0", "ä"])
def test_a_name_that_is_no_safe_path_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be the name"):
        Records(tmp_path).home(name)


def test_the_record_is_removed_last(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for name in ("record.json", "zz", "aa"):
        (records.home("x") / name).mkdir(parents=True)
    assert records.parts("x")[-1].name == "record.json"


def test_process_numbers_of_another_boot_mean_nothing() -> None:
    assert record().processes() == {ProcessRef(3, 4), ProcessRef(5, 6)}
    assert record(boot="earlier").processes() == set()


def test_a_process_is_known_by_its_start_too() -> None:
    me = ProcessRef.of(os.getpid())
    assert me is not None
    assert me.is_alive()
    imposter = ProcessRef(me.pid, me.started + 1)
    assert not imposter.is_alive()
    assert imposter.open() is None
