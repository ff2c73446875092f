"""Images leave this machine and come back equal: by archives, by a registry, by Docker."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError, SpecError
from atoll.images import Images, Progress
from atoll.images.access import Access, parse_places, pulling_with
from atoll.images.push import Push
from needs import needs
from unit.images.archives import digest, directory, file, oci_config, small_root, symlink, tar
from unit.images.registries import PASSWORD, USER, Front, registry
from unit.images.stacked_images import ROOT, assert_equal, stacked

pytestmark = needs("root")


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return Images(tmp_path / "data")


@pytest.fixture(scope="module")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry") / "open") as address:
        yield address


async def test_an_image_that_is_saved_and_loaded_is_equal(images: Images, tmp_path: Path) -> None:
    image = await stacked(images, tmp_path)
    assert len(image.layers) == 2
    size = await images.save("mine:1", tmp_path / "out.tar")
    assert size == (tmp_path / "out.tar").stat().st_size
    others = Images(tmp_path / "others")
    loaded = await others.load(tmp_path / "out.tar")
    assert loaded.reference == "docker.io/library/mine:1"
    assert_equal(images, image, others, loaded)
    renamed = await others.load(tmp_path / "out.tar", "team/other:2")
    assert renamed.reference == "docker.io/team/other:2"
    assert renamed.digest == loaded.digest
    imported = await others.import_tar(tmp_path / "out.tar", "imported")
    assert imported.digest == loaded.digest


async def test_the_same_image_becomes_the_same_bytes(images: Images, tmp_path: Path) -> None:
    await stacked(images, tmp_path)
    for name in ("one", "two"):
        await images.save("mine:1", tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


async def test_an_archive_has_one_oci_layer_for_each_layer(images: Images, tmp_path: Path) -> None:
    await stacked(images, tmp_path)
    await images.save("mine:1", tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar") as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(name)
            assert member is not None
            return member.read()

        index = json.loads(read("index.json"))
        assert json.loads(read("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
        assert json.loads(read("manifest.json"))[0]["RepoTags"] == ["mine:1"]
        manifest = json.loads(read(f"blobs/sha256/{index['manifests'][0]['digest'][7:]}"))
        config = json.loads(read(f"blobs/sha256/{manifest['config']['digest'][7:]}"))
        plain = [gzip.decompress(read(f"blobs/sha256/{layer['digest'][7:]}")) for layer in manifest["layers"]]
    assert config["rootfs"]["diff_ids"] == [digest(layer) for layer in plain]
    assert sum(not step.get("empty_layer") for step in config["history"]) == 2
    with tarfile.open(fileobj=io.BytesIO(plain[1])) as layer:
        names = {member.name for member in layer}
    assert names == {".wh.gone", "old", "old/.wh..wh..opq", "old/c", "srv", "srv/new"}


@needs("docker-registry")
async def test_an_image_that_is_pushed_and_pulled_is_equal(images: Images, tmp_path: Path, open_registry: str) -> None:
    image = await stacked(images, tmp_path)
    with Front(open_registry, "") as front:
        pushed = await images.push("mine:1", f"{front.address}/team/mine:1")
        again = await images.push("mine:1", f"{front.address}/team/mine:2")
        sent = [path for method, path, _ in front.asked if method == "PUT" and "/blobs/" in path]
        assert len(sent) == 3  # two layers and the configuration, only once
        assert (again.digest, again.sent_bytes) == (pushed.digest, 0)
        others = Images(tmp_path / "others")
        pulled = await others.pull(f"{front.address}/team/mine@{pushed.digest}")
        assert_equal(images, image, others, pulled)


@needs("docker-registry")
async def test_an_upload_that_breaks_off_goes_on(images: Images, tmp_path: Path, open_registry: str) -> None:
    image = await stacked(images, tmp_path)
    part, Push.__init__.__defaults__ = Push.__init__.__defaults__, (1000,)
    try:
        with Front(open_registry, "upload broken off at first") as front:
            await images.push("mine:1", f"{front.address}/parts/mine:1")
            assert front.stalled.is_set()
            parts = [path for method, path, _ in front.asked if method == "PATCH"]
            assert len(parts) > 3
    finally:
        Push.__init__.__defaults__ = part
    others = Images(tmp_path / "others")
    pulled = await others.pull(f"{open_registry}/parts/mine:1")
    assert_equal(images, image, others, pulled)


@needs("docker-registry")
async def test_a_registry_with_a_password_is_written_to_after_login(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stacked(images, tmp_path)
    with registry(tmp_path / "closed", password=True) as address:
        with pytest.raises(ImageError, match="denies access to"):
            await images.push("mine:1", f"{address}/a/b:1")
        (tmp_path / "docker").mkdir()
        entry = {"username": USER, "password": PASSWORD}
        (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {address: entry}}))
        assert (await images.push("mine:1", f"{address}/a/b:1")).sent_bytes > 0


@needs("docker-registry")
async def test_a_push_is_led_nowhere_else(images: Images, tmp_path: Path, open_registry: str) -> None:
    await stacked(images, tmp_path)
    with Front(open_registry, "") as inner, Front(open_registry, "upload elsewhere") as front:
        front.storage = inner.address
        with pulling_with(Access(True, *parse_places([front.address]))), pytest.raises(ImageError):
            await images.push("base", f"{front.address}/a/b:1")
        assert inner.asked == []
        front.mode = "upload to a file"
        with pytest.raises(ImageError, match="unsafe address"):
            await images.push("mine:1", f"{front.address}/a/b:1")


async def test_what_has_no_name_in_a_registry_is_not_pushed(images: Images, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(ROOT)
    await images.import_tar(tmp_path / "root.tar")
    with pytest.raises(SpecError, match="not a name in a registry"):
        await images.push(f"tar:{tmp_path}/root.tar")
    with pytest.raises(SpecError, match="host"):
        await images.push("host", "127.0.0.1:1/a/b")
    with pytest.raises(ImageNotFoundError):
        await images.push("absent", "127.0.0.1:1/a/b")


async def test_an_image_that_is_being_saved_is_not_removed(images: Images, tmp_path: Path) -> None:
    image = await stacked(images, tmp_path)
    seen: list[bool] = []

    def remove(_: Progress) -> None:
        if seen:
            return
        with pytest.raises(ImageError, match="is used by"):
            images.store.remove(image.reference, Work())
        seen.append(True)

    await images.save("mine:1", tmp_path / "out.tar", remove)
    await asyncio.sleep(0)
    assert seen == [True]
    assert images.store.leases() == {}


def docker_archive(name: str, *layers: bytes) -> bytes:
    config = oci_config(layers)
    listed = [
        {"Config": "c.json", "RepoTags": [name] if name else None, "Layers": [f"{n}.tar" for n in range(len(layers))]}
    ]
    return tar(
        file("c.json", config),
        *(file(f"{number}.tar", layer) for number, layer in enumerate(layers)),
        file("manifest.json", json.dumps(listed).encode()),
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (ROOT, "root file system and no image"),
        (docker_archive("", ROOT), "is not the name of an image"),
        (docker_archive("../../etc", ROOT), "names its image"),
        (docker_archive("mine:1", tar(directory("dev"), symlink("etc", "/"))), "not a directory"),
        (docker_archive("mine:1", ROOT)[:-3000], "cut off"),
        (docker_archive("mine:1", small_root(file("../escape"))), "\\.\\."),
        (gzip.compress(docker_archive("mine:1", small_root(file("zeros", bytes(200 << 20))))), "decompression bombs"),
    ],
    ids=["no image", "no name", "bad name", "links", "cut off", "escape", "bomb"],
)
async def test_what_cannot_be_loaded_leaves_nothing(
    content: bytes, reason: str, images: Images, tmp_path: Path
) -> None:
    (tmp_path / "bad.tar").write_bytes(content)
    with pytest.raises((ImageError, SpecError), match=reason):
        await images.load(tmp_path / "bad.tar")
    assert await images.ls() == []
    assert [path for path in images.store.directory.glob("*/*") if path.parent.name != "blobs"] == []


def test_the_name_of_a_recipe_means_the_recipe(images: Images) -> None:
    with pytest.raises(ImageNotFoundError, match="recipe:debian"):
        asyncio.run(images.get("debian"))


async def test_a_loaded_debian_goes_before_the_recipe(images: Images, tmp_path: Path) -> None:
    (tmp_path / "mine.tar").write_bytes(docker_archive("debian:bookworm-slim", ROOT))
    loaded = await images.load(tmp_path / "mine.tar")
    assert loaded.reference == "docker.io/library/debian:bookworm-slim"
    assert (await images.ensure("debian:bookworm-slim")).digest == loaded.digest
