"""Debian images from mmdebstrap, for real. One is built for all tests that only look at it."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError, SpecError
from atoll.images import Images, Progress, Recipe
from atoll.images.archive_program import running
from atoll.images.recipes import BUILT_IN, Recipes
from needs import needs
from unit.images.conftest import start, until

needs_mmdebstrap = needs("mmdebstrap")
needs_root = needs("root")


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "data")


def _in_overlay(root: Path, scratch: Path, command: str) -> str:
    """Run a command as a sandbox would see the image: below an overlay, which vanishes with its mount namespace."""
    scratch.mkdir()
    mount = f"lowerdir={root},upperdir={scratch}/t/u,workdir={scratch}/t/w"
    script = (
        f"cd {scratch} && mkdir t m && mount -t tmpfs t t && mkdir t/u t/w && mount -t overlay -o {mount} o m"
        " && touch m/dev/null && mount --bind /dev/null m/dev/null"
        f" && exec chroot m bash -c '{command}'"
    )
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _tied_processes(marker: str) -> list[str]:
    """Command lines of living processes that mention a path."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@needs_mmdebstrap
@needs_root
@pytest.mark.timeout(600)
async def test_a_suite_is_built_and_says_nothing_about_this_machine(images: Images, tmp_path: Path) -> None:
    steps: list[Progress] = []
    image = await images.ensure("debian:bookworm", steps.append)
    assert image.root is not None
    os_release = (image.root / "etc/os-release").read_text()
    assert "VERSION_CODENAME=bookworm" in os_release
    assert _in_overlay(image.root, tmp_path / "overlay", "apt-get --version && id -un").endswith("root\n")
    assert (image.root / "etc/hostname").read_text() == "sandbox\n"
    assert (image.root / "etc/resolv.conf").read_text() == ""
    assert platform.node() not in (image.root / "etc/hosts").read_text()
    assert not (image.root / "etc/apt/apt.conf.d/99mmdebstrap").exists()
    assert (image.root / "etc/ssl/certs/ca-certificates.crt").stat().st_size > 0
    assert any(step.stage == "build" and "installing" in step.detail for step in steps)
    set_ids = [path for path in image.root.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o6000]
    assert set_ids == []
    await images.verify("debian:bookworm")
    assert await images.ensure("debian:bookworm") == image
    assert list(images.store.directory.glob("tmp/*")) == []


@needs_mmdebstrap
@needs_root
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_python_recipe_has_pip_and_git(images: Images, tmp_path: Path) -> None:
    image = await images.ensure("python")
    assert image.root is not None
    command = "python3 -m venv /tmp/v && /tmp/v/bin/pip --version && git --version && curl --version"
    _in_overlay(image.root, tmp_path / "overlay", command)


@needs_mmdebstrap
@needs_root
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_another_suite_than_this_machine_s_is_built_from_the_same_mirror(images: Images) -> None:
    image = await images.ensure("debian:trixie")
    assert image.root is not None
    assert "trixie" in (image.root / "etc/os-release").read_text()


@needs_mmdebstrap
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_package_that_does_not_exist_is_named(images: Images) -> None:
    with pytest.raises(ImageError, match="no-such-package") as caught:
        await images.build(Recipe("broken", packages=("no-such-package",)))
    assert "names of the packages" in (caught.value.hint or "")
    assert list(images.store.directory.glob("tmp/*")) == []
    assert await images.ls() == []


@needs_mmdebstrap
@pytest.mark.timeout(300)
async def test_a_mirror_that_cannot_be_reached_is_an_error_with_advice(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        (tmp_path / "apt.conf").write_text(f'Acquire::http::Proxy "http://127.0.0.1:{closed.getsockname()[1]}";\n')
        monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
        with pytest.raises(ImageError, match="building 'debian' failed") as caught:
            await images.ensure("debian:bookworm")
    assert "mirrors can be reached" in (caught.value.hint or "")


@needs_mmdebstrap
@pytest.mark.timeout(300)
async def test_cancelling_a_build_kills_everything_it_started(images: Images, tmp_path: Path) -> None:
    running = asyncio.Event()

    def watch(step: Progress) -> None:
        if "download" in step.detail or "extract" in step.detail:
            running.set()

    task = asyncio.create_task(images.ensure("debian:bookworm", watch))
    await running.wait()
    assert _tied_processes(f"TMPDIR={tmp_path}")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _tied_processes(f"TMPDIR={tmp_path}") == []
    assert [str(path) for path in images.store.directory.glob("*/*")] == []


@needs_mmdebstrap
@needs_root
@pytest.mark.timeout(300)
async def test_a_build_dies_with_the_process_that_wanted_it(images: Images, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from atoll.images import Images\n"
        "asyncio.run(Images(sys.argv[1]).ensure('debian:bookworm'))"
    )
    process = start(script, str(tmp_path / "data"))
    await until(lambda: list(images.store.directory.glob("tmp/*/scratch/mmdebstrap.*/usr")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    await until(lambda: not _tied_processes(f"TMPDIR={tmp_path}"))
    assert (await images.gc()).leftovers > 0
    assert [str(path) for path in images.store.directory.glob("*/*")] == []


async def test_without_mmdebstrap_the_error_says_what_to_install(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ImageError) as caught:
        await images.ensure("debian:bookworm")
    assert caught.value.hint == "apt-get install mmdebstrap"


@pytest.mark.parametrize(
    ("name", "suite", "packages"),
    [
        ("../x", "bookworm", ()),
        ("host", "bookworm", ()),
        ("x", "no-suite", ()),
        ("x", "--help", ()),
        ("x", "bookworm", ("--setup-hook=id",)),
        ("x", "bookworm", ("a,b",)),
        ("x", "bookworm", ("git\n",)),
        ("x", "bookworm", ("?essential",)),
        ("x", "bookworm", ("./local.deb",)),
    ],
)
def test_a_recipe_cannot_smuggle_in_options(name: str, suite: str, packages: tuple[str, ...]) -> None:
    with pytest.raises(SpecError):
        Recipe(name, suite, packages)


def test_recipes_are_kept_and_win_over_built_in_ones(tmp_path: Path) -> None:
    recipes = Recipes(tmp_path / "recipes")
    assert recipes.all() == BUILT_IN
    mine = Recipe("python", "trixie", ("python3",))
    recipes.add(mine)
    assert Recipes(tmp_path / "recipes").get("python") == mine
    assert mine.digest != BUILT_IN["python"].digest
    recipes.remove("python")
    recipes.remove("python")
    assert recipes.get("python") == BUILT_IN["python"]
    with pytest.raises(ImageNotFoundError):
        recipes.get("absent")
    (tmp_path / "recipes/bad.json").write_text("{}")
    with pytest.raises(SpecError, match=r"bad\.json"):
        recipes.all()


@needs("root", "mount", "unshare")
def test_what_a_program_mounts_is_not_mounted_here(tmp_path: Path) -> None:
    """A killed program would leave it behind, and the removal of its tree would reach what is mounted there."""
    script = 'mount -t tmpfs none "$1" && touch "$1/inside" && echo mounted && exec sleep 100'
    with running(["sh", "-c", script, "sh", str(tmp_path)], dict(os.environ), Work(), lambda _: None, "") as program:
        assert program.read(8) == b"mounted\n"
        assert not (tmp_path / "inside").exists()
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
