"""Environments are made once, on first use, from the cache if it has them, and nothing of the machine stays in them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.archive.work import Progress, Work
from atoll.builds import environments
from atoll.builds.environments import making
from atoll.builds.mirrors import Mirrors
from atoll.errors import ImageError
from atoll.images import Images, Kind, tree_view
from atoll.images.contents import read_contents
from atoll.images.image_cache import ImageCache
from atoll.images.reference import ENVIRONMENTS
from atoll.model.network_policy import Rule
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from builds.small_root import BASE, Workshop
from needs import needs

pytestmark = [needs("root", "busybox", "mkfs.btrfs")]
SECRET = "do-not-keep-this"
OWN = "own-certificate-authority"
CODE = f"FROM {BASE}\nCOPY file /file\nRUN cat /run/atoll-build/ca $TOKEN_OF_PIP | wc -c > /size; echo $TOKEN_OF_PIP\n"
COMPUTER = "FROM code\nENV MADE=yes\nRUN echo two > /two && rm /file\n"


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recipes of two small environments, and a machine with credentials and an authority of its own."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "file").write_text("content\n")
    (folder / "code.Dockerfile").write_text(CODE)
    (folder / "computer.Dockerfile").write_text(COMPUTER)
    found = Mirrors(
        rules=(Rule(domain="pip.test"),),
        variables={"TOKEN_OF_PIP": "/run/atoll-build/token"},
        files={"/run/atoll-build/ca": OWN.encode(), "/run/atoll-build/token": SECRET.encode()},
        secrets=(SECRET,),
    )
    monkeypatch.setattr(environments, "CONTEXT", folder)
    monkeypatch.setattr(making, "CONTEXT", folder)
    monkeypatch.setattr(Mirrors, "of_machine", classmethod(lambda *_, **__: found))
    monkeypatch.setenv("ATOLL_IMAGE_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
async def images(workshop: Workshop, recipes: Path) -> AsyncIterator[Images]:
    made = Images(workshop.settings.data_dir, settings=workshop.settings)
    yield made
    await workshop.engine.prune_steps(0)
    for name in ENVIRONMENTS:
        if made.store.find(name) is not None:
            made.store.remove(name, Work())


async def test_an_environment_is_made_on_first_use_by_one_of_all_who_want_it(
    workshop: Workshop, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    original = making._built

    async def counted(images: Images, name: str, *rest: object, **options: object) -> object:
        built.append(name)
        return await original(images, name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(making, "_built", counted)
    others = [Images(workshop.settings.data_dir, settings=workshop.settings) for _ in range(3)]
    made = await asyncio.gather(*(each.ensure("computer") for each in (images, *others)))
    assert len({image.digest for image in made}) == 1
    assert sorted(built) == ["code", "computer"]
    image = made[0]
    assert (image.reference, image.kind, image.config.env["MADE"]) == ("computer", Kind.ENVIRONMENT, "yes")
    assert {each.reference for each in await images.ls()} == {"code", "computer", f"docker.io/library/{BASE}:latest"}
    async with AsyncSandbox(engine=workshop.engine, settings=workshop.settings, image="computer") as sandbox:
        shown = await sandbox.exec("cat /two; ls /file; cat /size")
        assert shown.stdout.split() == ["two", str(len(OWN + SECRET))]


async def test_nothing_of_the_machine_stays_in_layers_configurations_or_events(
    workshop: Workshop, images: Images
) -> None:
    said: list[str] = []
    await images.ensure("code", lambda step: said.append(repr(step)))
    image = await images.get("code")
    assert said
    texts = json.dumps(dataclasses.asdict(image.config)) + repr(image.notes) + "".join(said)
    assert not any(trace in texts for trace in (SECRET, OWN, "/run/atoll-build/token", "pip.test"))
    for layer in image.layers:
        texts = "".join(
            path.read_text(errors="replace") for path in layer.rglob("*") if path.is_file() and not path.is_symlink()
        )
        assert SECRET not in texts
        assert OWN not in texts
        assert not (layer / "run/atoll-build").exists()


async def test_progress_counts_the_steps(images: Images) -> None:
    said: list[Progress] = []
    await images.ensure("computer", said.append)
    steps = [(step.step, step.steps) for step in said if step.steps]
    assert steps == [(1, 2), (2, 2), (1, 1)]


async def test_another_data_directory_takes_it_from_the_cache(
    workshop: Workshop, images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await images.ensure("computer")

    async def never(*_: object, **__: object) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(making, "_built", never)
    other = Images(tmp_path / "other", settings=Settings(tmp_path / "other", tmp_path / "run"))
    second = await other.ensure("computer")
    assert (second.digest, second.config, second.source) == (first.digest, first.config, first.source)
    assert (await other.verify("computer")).digest
    with tree_view.view(second.layers) as root:
        assert "file" not in os.listdir(root)
        read_contents(root)


async def test_a_damaged_cache_is_not_used(workshop: Workshop, images: Images, tmp_path: Path) -> None:
    first = await images.ensure("code")
    cache = ImageCache.of_user()
    assert cache is not None
    (layer,) = tmp_path.glob(f"cache/layers/{first.digest.removeprefix('sha256:')}/rootfs")
    (layer / "size").unlink()
    (layer / "size").write_text("other")
    other = Images(tmp_path / "other", settings=Settings(tmp_path / "other", tmp_path / "run"))
    assert cache.load(other.store, "code", first.source, Work()) is None
    assert other.store.find("code") is None


async def test_a_changed_recipe_makes_another_version_and_the_cache_keeps_one(
    images: Images, recipes: Path, tmp_path: Path
) -> None:
    first = await images.ensure("code")
    (recipes / "file").write_text("other\n")
    second = await images.ensure("code")
    assert (first.digest, first.source) != (second.digest, second.source)
    kept = {path.name for path in tmp_path.glob("cache/layers/*")}
    assert first.digest.removeprefix("sha256:") not in kept
    assert second.digest.removeprefix("sha256:") in kept


async def test_a_failed_build_leaves_no_image_and_is_tried_again(images: Images, recipes: Path) -> None:
    (recipes / "code.Dockerfile").write_text(f"FROM {BASE}\nRUN exit 3\n")
    with pytest.raises(ImageError, match="exit code 3"):
        await images.ensure("code")
    assert images.store.find("code") is None
    (recipes / "code.Dockerfile").write_text(CODE)
    assert (await images.ensure("code")).reference == "code"


def test_a_recipe_of_the_user_comes_before_an_environment() -> None:
    from atoll.images.reference import parse

    assert parse("code").kind is Kind.ENVIRONMENT
    assert str(parse("code")) == "code"
    assert parse("code", ("code",)).kind is Kind.RECIPE


def test_the_version_of_an_environment_covers_its_files_and_its_base(recipes: Path) -> None:
    before = environments.digest("code"), environments.digest("computer")
    (recipes / "file").write_text("other\n")
    after = environments.digest("code"), environments.digest("computer")
    assert before[0] != after[0]
    assert before[1] != after[1]
