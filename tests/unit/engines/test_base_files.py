from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from atoll.engines.bubblewrap import base_files as module
from atoll.engines.bubblewrap.base_files import base_files, sweep


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "etc/ssl/certs").mkdir(parents=True)
    (tmp_path / "etc/ssl/private").mkdir()
    (tmp_path / "etc/ssl/private/key").write_text("secret")
    (tmp_path / "etc/shadow").write_text("secret")
    (tmp_path / "etc/passwd").write_text("admin:x:0:0::/root:/bin/sh")
    (tmp_path / "etc/resolv.conf").write_text("nameserver 10.0.0.1")
    (tmp_path / "etc/ssl/certs/ca-certificates.crt").write_text("certificates")
    (tmp_path / "etc/alternatives").mkdir()
    (tmp_path / "etc/alternatives/awk").symlink_to("/usr/bin/mawk")
    (tmp_path / "etc/alternatives/awk.1.gz").symlink_to("/usr/share/man/man1/mawk.1.gz")
    (tmp_path / "etc/localtime").symlink_to(tmp_path / "zone")
    (tmp_path / "zone").write_text("here")
    (tmp_path / "agent").write_text("#!")
    return tmp_path


def make(host: Path) -> Path:
    return base_files(host / "engine", host / "agent", host / "etc")


def test_it_holds_what_programs_need_and_no_secret(host: Path) -> None:
    base = make(host)
    found = {str(path.relative_to(base)): path for path in base.rglob("*") if not path.is_dir()}
    assert sorted(found) == [
        *(
            "agent",
            "etc/alternatives/awk",
            "etc/group",
            "etc/hosts",
            "etc/localtime",
            "etc/nsswitch.conf",
            "etc/passwd",
            "etc/resolv.conf",
        ),
        *("etc/shells", "etc/ssl/cert.pem", "etc/ssl/certs/ca-certificates.crt", "nothing"),
    ]
    assert "admin" not in found["etc/passwd"].read_text()
    assert found["etc/resolv.conf"].read_text() == ""
    assert found["etc/localtime"].read_text() == "here"
    assert found["etc/ssl/cert.pem"].read_text() == "certificates"
    assert os.readlink(found["etc/alternatives/awk"]) == "/usr/bin/mawk"


def test_every_user_can_read_it_and_run_the_agent(host: Path) -> None:
    old = os.umask(0o077)
    try:
        base = make(host)
    finally:
        os.umask(old)
    assert (base / "agent").stat().st_mode & 0o777 == 0o755
    assert (base / "etc/ssl/certs/ca-certificates.crt").stat().st_mode & 0o777 == 0o644
    assert (base / "etc").stat().st_mode & 0o777 == 0o755
    assert base.parent.parent.stat().st_mode & 0o777 == 0o711


def test_it_is_made_once_and_again_when_the_host_changed(host: Path) -> None:
    first = make(host)
    assert make(host) == first
    (host / "agent").write_text("#! new")
    second = make(host)
    assert second != first
    assert (second / "agent").read_text() == "#! new"
    assert first.exists(), "sandboxes that run may use it"


def test_those_of_earlier_boots_are_removed(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "boot_id", lambda: "aaaaaaaa-1")
    old = make(host)
    monkeypatch.setattr(module, "boot_id", lambda: "bbbbbbbb-2")
    new = make(host)
    assert list(new.parent.parent.iterdir()) == [new.parent]
    assert not old.parent.exists()


def test_what_a_killed_process_was_copying_is_removed_and_that_of_a_living_one_is_not(host: Path) -> None:
    base = make(host)
    dead = subprocess.Popen(["true"])
    dead.wait()
    bases = base.parent.parent
    (bases / f".0123.{dead.pid}" / "etc").mkdir(parents=True)
    (bases / f".4567.{os.getpid()}").mkdir()
    sweep(bases.parent)
    assert sorted(path.name for path in bases.iterdir()) == [f".4567.{os.getpid()}", base.parent.name]
