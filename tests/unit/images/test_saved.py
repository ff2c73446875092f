"""Images in archives, as `docker save` and OCI tools write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from atoll.errors import ImageError, ImageNotFoundError
from atoll.images import Images
from needs import needs
from unit.images.archives import digest, file, hard_link, oci_config, small_root, symlink, tar

BASE, TOP = small_root(file("etc/old", b"1")), tar(file("etc/.wh.old"), file("etc/new", b"2"))


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "data")


def docker_archive(*more: bytes, layers: tuple[str, ...] = ("a/layer.tar", "b/layer.tar")) -> bytes:
    manifest = json.dumps([{"Config": "c.json", "RepoTags": ["x:1"], "Layers": list(layers)}]).encode()
    return tar(
        file("a/layer.tar", BASE),
        file("b/layer.tar", TOP),
        file("c.json", oci_config([BASE, TOP])),
        file("manifest.json", manifest),
        *more,
    )


def oci_archive() -> bytes:
    packed = [gzip.compress(layer) for layer in (BASE, TOP)]
    config = oci_config([BASE, TOP])
    kind = "application/vnd.oci.image.layer.v1.tar+gzip"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest(config),
                "size": len(config),
            },
            "layers": [{"mediaType": kind, "digest": digest(layer), "size": len(layer)} for layer in packed],
        }
    ).encode()
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": digest(manifest),
        "size": len(manifest),
    }
    blobs = [file(f"blobs/{digest(data).replace(':', '/')}", data) for data in (*packed, config, manifest)]
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    return tar(file("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'), file("index.json", index), *blobs)


@pytest.mark.parametrize(
    "archive", [docker_archive(), oci_archive(), gzip.compress(docker_archive())], ids=["docker", "oci", "gzip"]
)
async def test_a_saved_image_is_flattened_with_its_configuration(
    archive: bytes, images: Images, tmp_path: Path
) -> None:
    (tmp_path / "saved.tar").write_bytes(archive)
    image = await images.ensure(f"tar:{tmp_path}/saved.tar")
    assert image.root is not None
    assert sorted(path.name for path in (image.root / "etc").iterdir()) == ["new", "os-release"]
    assert not (image.root / "manifest.json").exists()
    assert image.config.env == {"PATH": "/usr/bin", "GREETING": "a=b"}
    assert (image.config.cmd, image.config.work_dir, image.config.user) == (("true",), "/srv", "1000:1000")
    assert await images.get(f"tar:{tmp_path}/saved.tar") == image


@pytest.mark.parametrize(
    "archive",
    [
        docker_archive(layers=("a/layer.tar",)),
        docker_archive(layers=("a/layer.tar", "a/layer.tar")),
        docker_archive(layers=("a/layer.tar", "../../../../../../../../etc/passwd")),
        docker_archive(symlink("b/layer.tar", "/etc/passwd")),
        docker_archive(file("manifest.json", b"[" * 100_000)),
        docker_archive(file("manifest.json", b"[]")),
        docker_archive(file("manifest.json", b"{}")),
        docker_archive(file("c.json", b"[]")),
        docker_archive(file("c.json", b'{"os":"windows"}')),
    ],
    ids=[
        "too few layers",
        "wrong layer",
        "path outside",
        "link outside",
        "deep JSON",
        "none",
        "malformed",
        "bad config",
        "windows",
    ],
)
async def test_a_hostile_saved_image_is_refused(archive: bytes, images: Images, tmp_path: Path) -> None:
    (tmp_path / "saved.tar").write_bytes(archive)
    with pytest.raises(ImageError):
        await images.ensure(f"tar:{tmp_path}/saved.tar")
    assert await images.ls() == []
    assert list(images.store.directory.glob("tmp/*")) == []


async def test_layers_that_are_links_to_each_other_are_read(images: Images, tmp_path: Path) -> None:
    """As older engines wrote layers that occur twice."""
    archive = docker_archive(
        file("d/layer.tar", TOP), symlink("b/layer.tar", "../d/layer.tar"), hard_link("x", "a/layer.tar")
    )
    (tmp_path / "saved.tar").write_bytes(archive)
    assert (await images.ensure(f"tar:{tmp_path}/saved.tar")).root is not None


async def test_without_docker_the_error_says_so(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ImageError, match="docker is not installed"):
        await images.ensure("docker:some/image")


@needs("docker")
async def test_an_engine_that_does_not_run_is_an_error(
    images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(ImageError, match="did not give us") as caught:
        await images.ensure("docker:some/image")
    assert not isinstance(caught.value, ImageNotFoundError)
