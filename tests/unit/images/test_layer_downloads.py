"""Layers of registries: transferred once, several at a time, resumed, and never for those whom the registry refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.images import ImageLimits, Images
from atoll.images.access import Access, parse_places, pulling_with
from atoll.images.blobs import BlobKey, Blobs
from atoll.images.registry_login import Credentials
from needs import needs
from unit.images.archives import digest, file, oci_config, small_root, tar
from unit.images.registries import CONFIG, LAYER, MANIFEST, PASSWORD, USER, Front, Pusher, registry

pytestmark = needs("docker-registry")
NOISE = random.Random(1).randbytes(700_000)
BASE = gzip.compress(small_root(file("noise", NOISE)), 1)
NEXT = gzip.compress(tar(file("next", random.Random(2).randbytes(400_000))), 1)


@pytest.fixture(scope="module")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry") / "open") as address:
        push(address, "1", BASE, NEXT)
        push(address, "2", BASE, gzip.compress(tar(file("other", b"2"))))
        yield address


def push(address: str, tag: str, *packed: bytes, password: bool = False) -> bytes:
    layers = {gzip.decompress(each): each for each in packed}
    return Pusher(address, "a/b", password=password).image(tag, list(layers), layers.__getitem__, "+gzip")


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return Images(tmp_path / "data", limits=ImageLimits(stall_s=0.5))


def blobs(images: Images, kind: str) -> list[str]:
    folder = images.store.directory / "blobs" / kind
    return sorted(path.name.split("-")[0] for path in folder.iterdir()) if folder.is_dir() else []


def hex_of(data: bytes) -> str:
    return digest(data).removeprefix("sha256:")


def place_partial(images: Images, front: Front, data: bytes, content: bytes) -> None:
    folder = images.store.directory / "blobs" / "partial"
    folder.mkdir(parents=True)
    (folder / BlobKey(front.address, digest(data)).file_name).write_bytes(content)


async def assert_whole(images: Images, reference: str) -> None:
    image = await images.ensure(reference)
    assert image.root is not None
    assert (image.root / "noise").read_bytes() == NOISE
    assert (image.root / "next").stat().st_size == 400_000
    assert blobs(images, "partial") == []


async def test_a_layer_is_transferred_once(open_registry: str, images: Images) -> None:
    with Front(open_registry, "") as front:
        await images.ensure(f"{front.address}/a/b:1")
        front.asked.clear()
        await images.ensure(f"{front.address}/a/b:2")
        base = f"/v2/a/b/blobs/{digest(BASE)}"
        assert [method for method, path, _ in front.asked if path == base] == ["HEAD"]
        await images.remove(f"{front.address}/a/b:1")
        await assert_whole(images, f"{front.address}/a/b:1")
        assert [method for method, path, _ in front.asked if path == base] == ["HEAD", "HEAD"]


async def test_layers_are_fetched_side_by_side(open_registry: str, images: Images) -> None:
    with Front(open_registry, "together") as front:  # answers only when two ask at once
        await assert_whole(images, f"{front.address}/a/b:1")


async def test_a_broken_connection_is_resumed(open_registry: str, images: Images) -> None:
    with Front(open_registry, "half of each") as front:
        with pytest.raises(ImageError, match="could not be read") as caught:
            await images.ensure(f"{front.address}/a/b:1")
        assert "pull again" in (caught.value.hint or "")
        ranges = [asked for _, path, asked in front.asked if path.endswith(digest(BASE)) and asked]
        assert len(ranges) >= 1
        assert all(asked.startswith("bytes=") for asked in ranges)
        front.mode = ""
        front.asked.clear()
        await assert_whole(images, f"{front.address}/a/b:1")
        assert next(asked for _, path, asked in front.asked if path.endswith(digest(BASE))) != ""


@pytest.mark.parametrize("mode", ["ignores ranges", "other range", "wrong range", "no such range"])
async def test_a_registry_that_cannot_resume_sends_all_of_it(mode: str, open_registry: str, images: Images) -> None:
    with Front(open_registry, mode) as front:
        place_partial(images, front, BASE, BASE[:100_000])
        await assert_whole(images, f"{front.address}/a/b:1")
        assert (f"/v2/a/b/blobs/{digest(BASE)}", "bytes=100000-") in [(path, asked) for _, path, asked in front.asked]


@pytest.mark.parametrize("content", [b"x" * 1000, b"x" * len(BASE), b"x" * (len(BASE) + 1)])
async def test_a_beginning_that_is_damaged_is_not_used(content: bytes, open_registry: str, images: Images) -> None:
    with Front(open_registry, "") as front:
        place_partial(images, front, BASE, content)
        await assert_whole(images, f"{front.address}/a/b:1")


@pytest.mark.parametrize("mode", ["stalled", pytest.param("drips", marks=pytest.mark.again)])
async def test_a_registry_that_stops_in_the_middle_is_given_up(mode: str, open_registry: str, images: Images) -> None:
    with Front(open_registry, mode) as front:
        with pytest.raises(ImageError, match="could not be read from the registry"):
            await images.ensure(f"{front.address}/a/b:1")
        front.mode = ""
        await assert_whole(images, f"{front.address}/a/b:1")


def test_a_killed_pull_is_gone_on_with(open_registry: str, images: Images, tmp_path: Path) -> None:
    program = (
        "import sys, asyncio\nfrom atoll.images import Images\nasyncio.run(Images(sys.argv[1]).ensure(sys.argv[2]))"
    )
    with Front(open_registry, "stalled") as front:
        name = f"{front.address}/a/b:1"
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "data"), name])
        partial = images.store.directory / "blobs" / "partial"
        while not any(path.stat().st_size for path in partial.glob("*")):
            assert process.poll() is None
            front.stalled.wait(0.01)
        process.kill()
        process.wait()
        front.mode = ""
        front.asked.clear()
        asyncio.run(assert_whole(images, name))
        assert any(asked for _, _, asked in front.asked)
    asyncio.run(images.gc())
    assert list((images.store.directory / "tmp").iterdir()) == []


async def test_one_failure_ends_the_other_transfers(open_registry: str, images: Images) -> None:
    """While one layer is on its way without end, another that is wrong ends the pull."""
    with Front(open_registry, "wrong layer") as front:
        with pytest.raises(ImageError, match="is not sha256:"):
            await images.ensure(f"{front.address}/a/b:1")
    assert list((images.store.directory / "tmp").iterdir()) == []
    assert list((images.store.directory / "roots").iterdir()) == []


async def test_cached_layers_are_not_for_those_whom_the_registry_refuses(images: Images, tmp_path: Path) -> None:
    with registry(tmp_path / "closed", password=True) as closed:
        push(closed, "1", BASE, NEXT, password=True)
        mine = Access(True, *parse_places([closed]), login=Credentials(USER, PASSWORD))
        with pulling_with(mine):
            await images.ensure(f"{closed}/a/b:1")
        assert len(blobs(images, "sha256")) == 2
        with pulling_with(Access(True, *parse_places([closed]))), pytest.raises(ImageError, match="denies access"):
            await images.ensure(f"{closed}/a/b:1")


async def test_a_registry_that_claims_a_layer_of_another_one_gains_nothing(open_registry: str, images: Images) -> None:
    """Somebody who knows the digest of a layer names it in a manifest of their own registry."""
    with Front(open_registry, "") as victim, Front(open_registry, "") as evil:
        await images.ensure(f"{victim.address}/a/b:1")
        config = oci_config([gzip.decompress(BASE)])
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest(config), "size": len(config)},
            "layers": [{"mediaType": f"{LAYER}+gzip", "digest": digest(BASE), "size": len(BASE)}],
        }
        evil.own["/v2/x/y/manifests/1"] = json.dumps(manifest).encode()
        evil.own[f"/v2/x/y/blobs/{digest(config)}"] = config
        evil.own[f"/v2/x/y/blobs/{digest(BASE)}"] = b"I have it, believe me"
        with pytest.raises(ImageError):
            await images.ensure(f"{evil.address}/x/y:1")


async def test_a_bomb_is_refused_from_the_cache_as_well(open_registry: str, tmp_path: Path) -> None:
    bomb = small_root(file("zeros", bytes(2_000_000)))
    Pusher(open_registry, "a/bomb").image("1", [bomb], gzip.compress, "+gzip")
    images = Images(tmp_path / "data", limits=ImageLimits(ratio=10, ratio_free_bytes=100_000))
    with Front(open_registry, "") as front:
        for _ in range(2):
            with pytest.raises(ImageError, match="decompression bombs"):
                await images.ensure(f"{front.address}/a/bomb:1")
        fetched = [path for method, path, _ in front.asked if method == "GET" and "/blobs/" in path]
        assert len(fetched) == 3  # the layer only once
    assert await images.ls() == []


async def test_mirrors_are_asked_before_the_registry(open_registry: str, tmp_path: Path) -> None:
    Pusher(open_registry, "library/python").image("3.12-slim", [small_root(file("py"))])
    with Front(open_registry, "") as empty, Front(open_registry, "") as full, Front(open_registry, "") as own:
        empty.own["/v2/a/b/manifests/1"] = b"nothing of use"
        mirrors = [f"http://{full.address}", f"{own.address}={empty.address}", f"{own.address}={full.address}"]
        images = Images(tmp_path / "data", registry_mirrors=mirrors)
        assert (await images.ensure("python:3.12-slim")).reference == "docker.io/library/python:3.12-slim"
        await images.ensure(f"{own.address}/a/b:1")
        assert len(empty.asked) == 1
        assert own.asked == []
        empty.own["/v2/a/b/manifests/2"] = full.own["/v2/a/b/manifests/2"] = b"nothing of use"
        await images.ensure(f"{own.address}/a/b:2")
        assert len(own.asked) > 0


async def test_a_login_for_the_registry_is_not_sent_to_a_mirror(open_registry: str, tmp_path: Path) -> None:
    with Front(open_registry, "token elsewhere") as mirror, Front(open_registry, "") as own:
        mirror.storage = mirror.address
        images = Images(tmp_path / "data", registry_mirrors=[f"{own.address}={mirror.address}"])
        with pulling_with(Access(True, *parse_places([own.address]), login=Credentials(USER, PASSWORD))):
            await images.ensure(f"{own.address}/a/b:1")
        assert {authorization for _, authorization in mirror.seen} == {""}
        assert len(mirror.seen) > 0


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache, work = Blobs(tmp_path / "blobs", 250), Work()
    keys = [BlobKey("r", digest(bytes([number]) * 100)) for number in range(3)]
    for number, key in enumerate(keys):
        with cache.writing(key, tmp_path / f"aside{number}", work) as path:
            path.write_bytes(bytes([number]) * 100)
            cache.keep(key, path, tmp_path / f"kept{number}")
        os.utime(tmp_path / f"kept{number}", (number, number))
    assert cache.take(keys[0], tmp_path / "again", work)
    assert cache.sweep() == 100
    assert [cache.has(key) for key in keys] == [True, False, True]
    assert (tmp_path / "kept1").read_bytes() == b"\1" * 100  # whoever has it goes on
    with cache.writing(keys[1], tmp_path / "aside", work):
        assert cache.sweep(0) == 200  # what is being written stays
        assert len(list((tmp_path / "blobs/partial").iterdir())) == 1


def test_a_layer_that_was_damaged_on_disk_is_not_taken(tmp_path: Path) -> None:
    cache, work, key = Blobs(tmp_path / "blobs", 1000), Work(), BlobKey("r", digest(b"right"))
    with cache.writing(key, tmp_path / "aside", work) as path:
        path.write_bytes(b"right")
        cache.keep(key, path, tmp_path / "kept")
    (tmp_path / "kept").write_bytes(b"wrong")
    assert not cache.take(key, tmp_path / "taken", work)
    assert not cache.has(key)
