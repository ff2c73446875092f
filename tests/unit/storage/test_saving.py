"""States of layers that are kept: whole, apart from each other, and gone when nobody wants them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.errors import EngineError, UnsupportedError
from atoll.storage import BtrfsLayers, PlainLayers
from needs import needs

needs_pool = needs("root", "mkfs.btrfs")


@pytest.fixture
def layers(tmp_path: Path):  # type: ignore[no-untyped-def]
    layers = BtrfsLayers(tmp_path)
    yield layers
    for name in layers.list():
        layers.delete_layer(name)
    for name in layers.list_saved():
        layers.delete_saved(name)
    layers.close()


def write(layers: BtrfsLayers, layer: str, text: str) -> None:
    (layers.open_layer(layer).path / "upper" / "file").write_text(text)


def read(layers: BtrfsLayers, name: str, *, saved: bool = False) -> str:
    with layers.looking(name, saved=saved) as path:
        return (path / "upper" / "file").read_text()


@needs_pool
def test_what_was_saved_stays_as_it_was(layers: BtrfsLayers) -> None:
    layers.create_layer("one", None)
    write(layers, "one", "first")
    layers.save("one", "kept")
    write(layers, "one", "second")
    assert read(layers, "kept", saved=True) == "first"
    layers.create_layer("two", None, "kept")
    assert read(layers, "two") == "first"
    write(layers, "two", "third")
    assert (read(layers, "one"), read(layers, "kept", saved=True)) == ("second", "first")
    layers.delete_saved("kept")
    layers.delete_saved("kept")
    assert (read(layers, "one"), read(layers, "two"), layers.list_saved()) == ("second", "third", [])


@needs_pool
def test_the_overlays_notes_are_not_taken_over(layers: BtrfsLayers) -> None:
    layer = layers.create_layer("one", None)
    (layer.path / "work" / "incompat" / "volatile").mkdir(parents=True)
    layers.save("one", "kept")
    assert os.listdir(layers.create_layer("two", None, "kept").path / "work") == []


@needs_pool
def test_a_layer_is_replaced_at_once_or_not_at_all(layers: BtrfsLayers) -> None:
    layers.create_layer("one", None)
    write(layers, "one", "first")
    layers.save("one", "kept")
    write(layers, "one", "second")
    layers.replace_layer("one", None, "kept").discard()
    assert read(layers, "one") == "second"
    replacement = layers.replace_layer("one", None, "kept")
    assert layers.list() == ["one"]
    replacement.commit()
    assert read(layers, "one") == "first"
    replacement.discard()
    with pytest.raises(EngineError, match="nothing saved as 'never'"):
        layers.replace_layer("one", None, "never")
    layers.replace_layer("one", None, None).commit()
    assert os.listdir(layers.open_layer("one").path / "upper") == []
    assert [name for name in os.listdir(layers.open_layer("one").path.parent) if name != "one"] == []


@needs_pool
def test_what_is_saved_survives_the_mount(layers: BtrfsLayers, tmp_path: Path) -> None:
    layers.create_layer("one", None)
    write(layers, "one", "first")
    layers.save("one", "kept")
    layers.delete_layer("one")
    layers.close()
    assert not os.path.ismount(tmp_path / "pool")
    assert read(BtrfsLayers(tmp_path), "kept", saved=True) == "first"


@needs_pool
def test_a_limit_holds_for_what_comes_from_a_saved_state(layers: BtrfsLayers) -> None:
    layers.create_layer("one", None)
    layers.save("one", "kept")
    path = layers.create_layer("two", 1 << 20, "kept").path / "upper" / "file"

    def fill() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(64):
                file.write(bytes(128 << 10))

    with pytest.raises(OSError, match=r"quota|space"):
        fill()


@needs_pool
def test_what_cannot_be_filled_is_not_kept(layers: BtrfsLayers) -> None:
    def fail(path: Path) -> None:
        (path / "upper" / "file").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(EngineError, match="No space left"):
        layers.make_saved("kept", fail)
    assert layers.list_saved() == []

    def fill(path: Path) -> None:
        (path / "upper" / "file").write_text("whole")

    layers.make_saved("kept", fill)
    assert read(layers, "kept", saved=True) == "whole"


@needs_pool
def test_a_layer_that_is_deleted_while_it_is_saved_leaves_nothing(layers: BtrfsLayers) -> None:
    layers.create_layer("one", None)
    layers.save("one", "kept")
    place = layers.open_layer("one").path.parent
    layers.delete_layer("one")
    with pytest.raises(EngineError):
        layers.save("one", "late")
    assert [name for name in os.listdir(place) if "one" in name] == []
    (place / ".one.kept").touch()  # as a process that was killed in the middle of it leaves it
    layers.create_layer("two", None)
    layers.save("two", "other")
    layers.sweep()
    assert [name for name in os.listdir(place) if name.endswith(".kept")] == [".two.kept"]


def test_plain_directories_say_what_is_missing(tmp_path: Path) -> None:
    layers = PlainLayers(tmp_path)
    layers.create_layer("one", None)
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        layers.save("one", "kept")
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        layers.create_layer("two", None, "kept")
