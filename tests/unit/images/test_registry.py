from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.errors import ImageError, ImageNotFoundError
from atoll.images import ImageLimits, Images, Progress
from atoll.images.oci_documents import machine
from atoll.images.registry_login import credentials_for
from needs import needs
from unit.images.archives import digest, file, oci_config, small_root, tar
from unit.images.registries import PASSWORD, TOKEN, USER, Front, Pusher, registry

pytestmark = needs("docker-registry")
LAYERS = [
    small_root(file("etc/old", b"1"), file("data", bytes(range(256)) * 4000)),
    tar(file("etc/.wh.old"), file("etc/new", b"2")),
]


def _zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout


@pytest.fixture(scope="module")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry") / "open") as address:
        Pusher(address, "a/b").image("1", LAYERS, gzip.compress, "+gzip")
        yield address


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return Images(tmp_path / "data")


@pytest.fixture
def login(tmp_path: Path) -> Callable[[str], None]:
    def write(address: str) -> None:
        (tmp_path / "docker").mkdir()
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {address: {"auth": secret}}}))

    return write


def assert_pulled(root: Path | None) -> None:
    assert root is not None
    assert sorted(path.name for path in (root / "etc").iterdir()) == ["new", "os-release"]
    assert (root / "data").stat().st_size == 256 * 4000


def assert_nothing(images: Images) -> None:
    """Layers that have been transferred may be there: they are for the next pull."""
    found = [path for path in images.store.directory.glob("*/*") if path.parent.name != "blobs"]
    assert [str(path) for path in found] == []


@pytest.mark.parametrize(
    ("pack", "packing"),
    [
        (bytes, ""),
        (gzip.compress, "+gzip"),
        pytest.param(_zstd, "+zstd", marks=needs("zstd")),
    ],
    ids=["plain", "gzip", "zstd"],
)
async def test_an_image_is_pulled_by_its_tag(
    pack: Callable[[bytes], bytes], packing: str, open_registry: str, images: Images
) -> None:
    manifest = Pusher(open_registry, f"pack/x{packing.strip('+')}").image("v1", LAYERS, pack, packing)
    steps: list[Progress] = []
    image = await images.ensure(f"{open_registry}/pack/x{packing.strip('+')}:v1", steps.append)
    assert_pulled(image.root)
    assert image.source == digest(manifest)
    assert (image.config.env["GREETING"], image.config.cmd, image.config.user) == ("a=b", ("true",), "1000:1000")
    pulled = [step for step in steps if step.stage == "pull" and step.total_bytes]
    assert pulled[-1].done_bytes == pulled[-1].total_bytes
    assert any(step.stage == "extract" for step in steps)


async def test_an_image_is_pulled_by_its_digest(open_registry: str, images: Images) -> None:
    manifest = Pusher(open_registry, "a/digest").image("", LAYERS)
    image = await images.ensure(f"{open_registry}/a/digest@{digest(manifest)}")
    assert_pulled(image.root)


async def test_pull_asks_again_and_transfers_only_what_changed(open_registry: str, images: Images) -> None:
    pusher = Pusher(open_registry, "a/moving")
    pusher.image("latest", LAYERS)
    name = f"{open_registry}/a/moving"
    first = await images.ensure(name)
    steps: list[Progress] = []
    assert await images.pull(name, steps.append) == first
    assert not [step for step in steps if step.total_bytes]
    pusher.image("latest", LAYERS[:1])
    assert await images.ensure(name) == first
    assert (await images.pull(name)).digest != first.digest


async def test_of_an_index_the_image_for_this_machine_is_taken(open_registry: str, images: Images) -> None:
    pusher = Pusher(open_registry, "a/multi")
    other, mine = pusher.image("", [small_root(file("wrong"))]), pusher.image("", LAYERS)
    index = pusher.index(
        "all", [(other, "linux", "s390x"), (mine, "linux", machine()[0]), (other, "windows", machine()[0])]
    )
    by_tag, by_digest = (
        await images.ensure(f"{open_registry}/a/multi:all"),
        await images.ensure(f"{open_registry}/a/multi@{digest(index)}"),
    )
    assert_pulled(by_tag.root)
    assert by_tag.digest == by_digest.digest
    pusher.index("foreign", [(other, "linux", "s390x")])
    with pytest.raises(ImageError, match="only for linux/s390x"):
        await images.ensure(f"{open_registry}/a/multi:foreign")


@pytest.mark.parametrize("name", ["a/b:absent", "absent/absent:1", f"a/b@sha256:{'0' * 64}"])
async def test_what_the_registry_does_not_have_is_not_found(name: str, open_registry: str, images: Images) -> None:
    with pytest.raises(ImageNotFoundError, match=open_registry):
        await images.ensure(f"{open_registry}/{name}")
    assert_nothing(images)


async def test_offline_the_error_names_the_registry_and_the_ways_out(images: Images) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ImageError, match=f"cannot reach the registry {address}") as caught:
            await images.ensure(f"{address}/a/b:1")
    for way in ("tar:/PATH", "debian:SUITE", "host"):
        assert way in (caught.value.hint or "")
    with pytest.raises(ImageError, match=r"registry\.invalid"):
        await images.ensure("registry.invalid/a/b:1")
    assert_nothing(images)


async def test_a_registry_with_a_password_is_read_after_login(
    images: Images, login: Callable[[str], None], tmp_path: Path
) -> None:
    with registry(tmp_path / "closed", password=True) as address:
        Pusher(address, "a/b", password=True).image("1", LAYERS)
        with pytest.raises(ImageError, match="denies access to") as caught:
            await images.ensure(f"{address}/a/b:1")
        assert f"docker login {address}" in (caught.value.hint or "")
        login(address)
        assert_pulled((await images.ensure(f"{address}/a/b:1")).root)


async def test_a_token_is_fetched_with_our_password_and_used(
    open_registry: str, images: Images, login: Callable[[str], None]
) -> None:
    with Front(open_registry, "token") as front:
        with pytest.raises(ImageError, match="issued no token"):
            await images.ensure(f"{front.address}/a/b:1")
        login(front.address)
        assert_pulled((await images.ensure(f"{front.address}/a/b:1")).root)
        asked = [path for path, _ in front.seen if path.startswith("/token")]
        assert len(asked) == 2
        assert asked[-1] == "/token?service=front&scope=repository%3Aa%2Fb%3Apull"


async def test_a_redirect_is_followed_without_our_token(
    open_registry: str, images: Images, login: Callable[[str], None]
) -> None:
    with Front(open_registry, "") as storage, Front(open_registry, "redirect") as front:
        front.storage = storage.address
        login(front.address)
        assert_pulled((await images.ensure(f"{front.address}/a/b:1")).root)
        assert len(storage.seen) == 3
        assert front.seen[-1][1] == f"Bearer {TOKEN}"
        assert {authorization for _, authorization in storage.seen} == {""}


@pytest.mark.parametrize("mode", ["busy at first", "broken off at first"])
async def test_a_failure_that_passes_is_survived(mode: str, open_registry: str, images: Images) -> None:
    with Front(open_registry, mode) as front:
        assert_pulled((await images.ensure(f"{front.address}/a/b:1")).root)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("wrong manifest", "sent something other"),
        ("wrong layer", "is not sha256:"),
        ("longer layer", "is not sha256:"),
        ("endless manifest", "a document of more than"),
        ("broken", "answers 500"),
        ("redirect to a file", "unsafe address"),
        ("redirect in a circle", "redirects too often"),
        ("evil realm", "unsafe address"),
    ],
)
async def test_a_registry_that_lies_is_refused_and_leaves_nothing(
    mode: str, reason: str, open_registry: str, images: Images
) -> None:
    with Front(open_registry, mode) as front:
        with pytest.raises(ImageError, match=reason):
            await images.ensure(f"{front.address}/a/b:1")
    assert_nothing(images)


async def test_cancelling_a_stalled_download_ends_at_once(open_registry: str, images: Images) -> None:
    with Front(open_registry, "stalled") as front:
        task = asyncio.create_task(images.ensure(f"{front.address}/a/b:1"))
        await asyncio.to_thread(front.stalled.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(5):
                await task
    assert_nothing(images)


async def test_layers_that_do_not_fit_their_configuration_are_refused(open_registry: str, images: Images) -> None:
    pusher = Pusher(open_registry, "a/mismatch")
    pusher.image("other", LAYERS, config=oci_config(LAYERS[::-1]))
    pusher.image("fewer", LAYERS, config=oci_config(LAYERS[:1]))
    pusher.image("windows", LAYERS, config=oci_config(LAYERS, os="windows"))
    for tag, reason in {"other": "is not what", "fewer": "does not fit", "windows": "not for Linux"}.items():
        with pytest.raises(ImageError, match=reason):
            await images.ensure(f"{open_registry}/a/mismatch:{tag}")
    assert_nothing(images)


async def test_an_artifact_that_is_no_file_system_is_refused(open_registry: str, images: Images) -> None:
    Pusher(open_registry, "a/chart").image("1", LAYERS[:1], packing=".something")
    with pytest.raises(ImageError, match="not a file system image"):
        await images.ensure(f"{open_registry}/a/chart:1")


async def test_a_download_over_the_limit_is_refused_before_it_starts(open_registry: str, tmp_path: Path) -> None:
    images = Images(tmp_path / "data", limits=ImageLimits(download_bytes=1000))
    with pytest.raises(ImageError, match="more than 1,000 bytes"):
        await images.ensure(f"{open_registry}/a/b:1")


def test_credentials_are_read_as_docker_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert credentials_for("r.example") is None
    helper = tmp_path / "docker-credential-test"
    helper.write_text('#!/bin/sh\nread -r name\n[ "$name" = h.example ] && echo \'{"Username":"u","Secret":"s"}\'\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    auth = base64.b64encode(b"me:pass:word").decode()
    config = {
        "auths": {"https://index.docker.io/v1/": {"auth": auth}, "r.example": {"identitytoken": "t"}, "e.example": {}},
        "credHelpers": {"h.example": "test", "n.example": "../evil"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    hub, token, helped = credentials_for("docker.io"), credentials_for("r.example"), credentials_for("h.example")
    assert hub is not None
    assert token is not None
    assert helped is not None
    assert (hub.username, hub.password) == ("me", "pass:word")
    assert token.identity_token == "t"
    assert (helped.username, helped.password) == ("u", "s")
    assert credentials_for("e.example") is None
    assert credentials_for("n.example") is None
    assert "pass" not in repr(hub)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ImageError, match="cannot be read"):
        credentials_for("r.example")
