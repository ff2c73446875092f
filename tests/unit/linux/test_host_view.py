from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.engines.linux.host_image import host_view


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    path = tmp_path / "etc"
    (path / "alternatives").mkdir(parents=True)
    (path / "ssl/certs").mkdir(parents=True)
    (path / "ssl/private").mkdir()
    (path / "ssl/private/key.pem").write_text("private")
    (path / "shadow").write_text("root:secret")
    (path / "passwd").write_text("operator:x:0:0:operator:/root:/bin/sh")
    (path / "services").write_text("http 80/tcp")
    (path / "npmrc").write_text("token")
    (path / "profile").write_text("umask 077")
    (path / "profile").chmod(0o600)
    (path / "alternatives/editor").symlink_to("/usr/bin/vi")
    (path / "alternatives/evil").symlink_to("/root/secret")
    (path / "ssl/certs/ca.pem").write_text("ca")
    os.mkfifo(path / "ssl/certs/pipe")
    return path


@pytest.mark.usefixtures("root")
def test_only_what_is_on_the_list_and_readable_by_all_is_shown(tmp_path: Path, etc: Path) -> None:
    made = host_view.skeleton(tmp_path / "host", etc) / host_view.INNER / "etc"
    assert (made / "services").read_text() == "http 80/tcp"
    assert (made / "ssl/certs/ca.pem").exists()
    assert os.readlink(made / "alternatives/editor") == "/usr/bin/vi"
    for name in ("shadow", "npmrc", "profile", "ssl/private", "alternatives/evil", "ssl/certs/pipe"):
        assert not os.path.lexists(made / name), name
    assert "operator" not in (made / "passwd").read_text()


@pytest.mark.usefixtures("root")
def test_it_is_made_once_and_anew_when_the_host_changes(tmp_path: Path, etc: Path) -> None:
    first = host_view.skeleton(tmp_path / "host", etc)
    assert host_view.skeleton(tmp_path / "host", etc) == first
    (etc / "services").write_text("http 8080/tcp")
    second = host_view.skeleton(tmp_path / "host", etc)
    assert second != first
    assert "80/tcp" in (first / host_view.INNER / "etc/services").read_text()
    assert not [name for name in os.listdir(tmp_path / "host") if name.startswith(".")]
