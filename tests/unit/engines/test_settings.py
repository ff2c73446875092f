from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.errors import EngineUnavailableError
from atoll.settings import Settings, owned_directory
from needs import needs


def test_root_uses_the_system_directories() -> None:
    settings = Settings.load({}, uid=0)
    assert (settings.data_dir, settings.run_dir) == (Path("/var/lib/atoll"), Path("/run/atoll"))


def test_a_user_has_directories_of_their_own() -> None:
    settings = Settings.load({"HOME": "/home/ada", "XDG_RUNTIME_DIR": "/run/user/7"}, uid=7)
    assert (settings.data_dir, settings.run_dir) == (Path("/home/ada/.local/share/atoll"), Path("/run/user/7/atoll"))


def test_without_a_runtime_directory_sockets_go_to_tmp() -> None:
    settings = Settings.load({"HOME": "/home/ada", "XDG_DATA_HOME": "/data"}, uid=7)
    assert (settings.data_dir, settings.run_dir) == (Path("/data/atoll"), Path("/tmp/atoll-7"))


def test_relative_xdg_directories_are_ignored() -> None:
    settings = Settings.load({"HOME": "/home/ada", "XDG_DATA_HOME": "data", "XDG_RUNTIME_DIR": "run"}, uid=7)
    assert (settings.data_dir, settings.run_dir) == (Path("/home/ada/.local/share/atoll"), Path("/tmp/atoll-7"))


@pytest.mark.parametrize("uid", [0, 7])
def test_our_own_variables_win(uid: int) -> None:
    settings = Settings.load({"ATOLL_DATA_DIR": "/a/../b", "ATOLL_RUN_DIR": "/c", "HOME": "/h"}, uid=uid)
    assert (settings.data_dir, settings.run_dir) == (Path("/b"), Path("/c"))


def test_a_relative_directory_of_ours_is_an_error() -> None:
    with pytest.raises(EngineUnavailableError, match="ATOLL_RUN_DIR is 'here'"):
        Settings.load({"ATOLL_RUN_DIR": "here"}, uid=0)


def test_a_socket_path_that_the_kernel_refuses_is_refused_with_advice() -> None:
    short, long = Settings(Path("/d"), Path("/r")), Settings(Path("/d"), Path("/" + "r" * 90))
    assert short.socket_path("process", "x") == Path("/r/process/x")
    with pytest.raises(EngineUnavailableError, match="ATOLL_RUN_DIR"):
        long.socket_path("process", "x")


def test_the_run_directory_is_closed_to_others(settings: Settings) -> None:
    old = os.umask(0)
    try:
        path = settings.engine_run_dir("process")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o700
    assert settings.run_dir.stat().st_mode & 0o777 == 0o700
    assert settings.engine_run_dir("process") == path


def test_a_directory_that_somebody_else_prepared_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    for name, reason in [("link", "not a directory"), ("open", "others can write"), ("file", "not a directory")]:
        with pytest.raises(EngineUnavailableError, match=reason):
            owned_directory(tmp_path / name, 0o700)


@needs("root")
def test_a_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(EngineUnavailableError, match="belongs to user 12345"):
        owned_directory(tmp_path / "theirs", 0o700)


def test_an_installation_keeps_its_name(settings: Settings) -> None:
    name = settings.installation_id()
    assert len(name) == 32
    assert Settings(settings.data_dir, settings.run_dir).installation_id() == name
    assert [path.name for path in settings.data_dir.iterdir()] == ["installation-id"]
