"""The bubblewrap command line, wall by wall."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from atoll.engines.bubblewrap.arguments import (
    AGENT,
    Descriptors,
    Surroundings,
    arguments,
    check_targets,
    hidden_arguments,
)
from atoll.errors import SpecError
from atoll.model import SandboxSpec

AROUND = Surroundings(
    home=Path("/data/process/x"),
    base=Path("/data/process/.base/1"),
    links={"/bin": "usr/bin", "/lib": "usr/lib"},
    directories=("/lib64",),
    fds=Descriptors(listener=5, info=6, hidden=7, hosts=None, filter=8),
)


def plan(around: Surroundings = AROUND, **spec: object) -> list[str]:
    return arguments(SandboxSpec.of(**spec), around)


def has(words: list[str], *expected: str) -> bool:
    return any(words[start : start + len(expected)] == list(expected) for start in range(len(words)))


def binds(words: list[str]) -> list[tuple[str, str, str]]:
    windows = zip(words, words[1:], words[2:], strict=False)
    return [window for window in windows if window[0] in ("--bind", "--ro-bind")]


def test_every_namespace_is_new_and_none_is_optional() -> None:
    words = plan()
    for namespace in ("user", "ipc", "pid", "net", "uts", "cgroup"):
        assert f"--unshare-{namespace}" in words
    assert not [word for word in words if word.endswith("-try") or word.startswith("--share")]
    assert "--disable-userns" in words
    assert has(words, "--cap-drop", "ALL")


def test_only_the_sandboxs_own_directories_are_writable() -> None:
    assert [bind[1:] for bind in binds(plan()) if bind[0] == "--bind"] == [
        ("/data/process/x/tmp", "/tmp"),
        ("/data/process/x/work", "/workspace"),
        ("/data/process/x/home", "/home/user"),
    ]


def test_of_the_host_only_usr_and_a_small_etc_can_be_seen() -> None:
    words = plan()
    assert {source for kind, source, _ in binds(words) if kind == "--ro-bind"} == {
        *("/data/process/.base/1/usr", "/lib64", "/data/process/.base/1/etc", "/data/process/.base/1/agent")
    }
    assert has(words, "--symlink", "usr/bin", "/bin")
    assert has(words, "--proc", "/proc", "--dev", "/dev")


def test_what_is_left_of_the_root_and_dev_is_read_only_or_bounded() -> None:
    words = plan()
    assert has(words, "--remount-ro", "/dev")
    assert has(words, "--remount-ro", "/")
    assert words.index("--chdir") > max(i for i, word in enumerate(words) if word in ("--bind", "--ro-bind"))
    assert has(words, "--size", str(64 << 20), "--perms", "1777", "--tmpfs", "/dev/shm")
    assert words.count("--tmpfs") == 1


def test_the_sandbox_does_not_end_with_us() -> None:
    assert "--die-with-parent" not in plan()


def test_the_agent_is_process_one_and_serves_the_inherited_socket() -> None:
    words = plan(work_dir="/srv/job", limits={"open_files": 99})
    assert "--as-pid-1" in words
    command = words[words.index("--") + 1 :]
    assert command == [AGENT, "--listen-fd", "5", "--work-dir", "/srv/job", "--rlimit-nofile", "99"]


def test_the_environment_is_cleared_and_never_on_the_command_line() -> None:
    assert not any("secret" in word for word in plan(env={"TOKEN": "secret"}))
    assert hidden_arguments([], {"TOKEN": "secret", "ODD": "\udcff"}) == (
        b"--clearenv\0--setenv\0TOKEN\0secret\0--setenv\0ODD\0\xff\0"
    )


def test_a_host_name_of_its_own_gets_an_entry_in_hosts() -> None:
    other = Surroundings(AROUND.home, AROUND.base, {}, (), Descriptors(5, 6, 7, hosts=8, filter=9))
    assert has(plan(), "--hostname", "sandbox")
    assert "--ro-bind-data" not in plan()
    assert has(plan(other, hostname="other"), "--ro-bind-data", "8", "/etc/hosts")


def test_volumes_are_bound_as_they_really_are_parents_first(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    words = plan(
        volumes=[
            {"host": str(tmp_path / "link"), "path": "/data/inner", "read_only": True},
            {"host": str(tmp_path), "path": "/data"},
        ]
    )
    assert binds(words)[-2:] == [
        ("--bind", str(tmp_path), "/data"),
        ("--ro-bind", str(tmp_path / "real"), "/data/inner"),
    ]


def test_a_volume_may_cover_the_work_directory(tmp_path: Path) -> None:
    words = plan(volumes=[{"host": str(tmp_path), "path": "/workspace"}])
    assert binds(words)[-1] == ("--bind", str(tmp_path), "/workspace")


def test_a_volume_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        plan(volumes=[{"host": str(tmp_path / "nothing"), "path": "/data"}])


@pytest.mark.parametrize("path", ["/proc/x", "/dev", "/sys", "/usr/local", "/etc", "/run/atoll", "/run", "/lib64", "/"])
def test_reserved_paths_cannot_be_covered(path: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="reserved"):
        check_targets(SandboxSpec.of(volumes=[{"host": str(tmp_path), "path": path}]))


@pytest.mark.parametrize("path", ["/usr/x", "/etc/x", "/run/atoll/x"])
def test_the_work_directory_cannot_be_in_a_reserved_path(path: str) -> None:
    with pytest.raises(SpecError, match="reserved"):
        check_targets(SandboxSpec.of(work_dir=path))


def test_two_volumes_cannot_have_one_path(tmp_path: Path) -> None:
    volume = {"host": str(tmp_path), "path": "/data"}
    with pytest.raises(SpecError, match="same path"):
        check_targets(SandboxSpec.of(volumes=[volume, volume]))


@pytest.mark.parametrize("work_dir", ["/tmp", "/home/user", "/home", "/tmp/deep/er"])
def test_the_work_directory_may_be_anywhere_else(work_dir: str) -> None:
    check_targets(SandboxSpec.of(work_dir=work_dir))
    targets = [target for kind, _, target in binds(plan(work_dir=work_dir)) if kind == "--bind"]
    assert work_dir in targets
    assert len(set(targets)) == len(targets)
    assert not any(inner.startswith(f"{outer}/") for inner, outer in itertools.combinations(targets, 2))
