"""Images that lie upon other images: what the store keeps, what it removes, and what a process sees of a stack."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.archive.overlay import mark_opaque, white_out
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError
from atoll.images import Image, Images, Kind, tree_view
from atoll.images.image_store import Store
from atoll.images.layer_roots import MAX_LAYERS
from needs import need

Fill = Callable[[Path], None]


@pytest.fixture
def images(tmp_path: Path) -> Images:
    need("root")
    return Images(tmp_path / "data")


def name_of(text: str) -> str:
    return f"docker.io/library/{text}:latest"


def add(store: Store, name: str, fill: Fill, below: str = "", owner: str = "") -> Image:
    with store.draft(Work()) as draft:
        fill(draft.rootfs)
        return store.commit(draft, Image(name_of(name), Kind.OCI, owner=owner), Work(), below=below)


def base(root: Path) -> None:
    for path in ("keep/one", "keep/two", "gone/deep/file", "opaque/old", "type"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)


def writing(path: str, text: str = "new") -> Fill:
    def fill(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return fill


def removing(path: str) -> Fill:
    def fill(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        white_out(os.open(root, os.O_RDONLY), path)

    return fill


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def files(top: Path) -> dict[str, tuple[int, bytes]]:
    """The type and mode of everything in a tree, and the content of its files."""
    found = {}
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        found[str(path.relative_to(top))] = (info.st_mode, path.read_bytes() if stat.S_ISREG(info.st_mode) else b"")
    return found


def seen(image: Image) -> dict[str, tuple[int, bytes]]:
    with tree_view.view(image.layers) as fd:
        return files(Path(f"/proc/self/fd/{fd}/."))


def roots(store: Store) -> set[str]:
    return {f"sha256:{path.name}" for path in (store.directory / "roots").iterdir()}


def test_a_layer_lies_on_an_image_and_shows_what_it_changes(images: Images) -> None:
    store = images.store
    lower = add(store, "lower", base)

    def change(root: Path) -> None:
        writing("keep/two", "changed")(root)
        (root / "opaque").mkdir()
        (root / "opaque/new").write_text("only this")
        (root / "type").mkdir()
        with opened(root) as fd, opened(root / "opaque") as hidden:
            white_out(fd, "gone")
            mark_opaque(hidden)

    upper = add(store, "upper", change, lower.digest)
    assert [layer.parent.name for layer in upper.layers] == [
        each.digest.removeprefix("sha256:") for each in (upper, lower)
    ]
    assert upper.root == upper.layers[0]
    assert upper.size_bytes > lower.size_bytes
    with tree_view.view(upper.layers) as fd:
        assert sorted(os.listdir(fd)) == ["dev", "etc", "keep", "opaque", "proc", "run", "sys", "tmp", "type"]
        root = tree_view.Root(fd)
        assert root.read("keep/one", 99) == b"keep/one"
        assert root.read("keep/two", 99) == b"changed"
        assert os.listdir(root.directory((b"opaque",))) == ["new"]
        root.close()
        with pytest.raises(OSError, match="Read-only"):
            os.mkdir("new", dir_fd=fd)
    assert store.get(name_of("upper")) == upper
    assert store.verify(name_of("upper"), Work()).size_bytes == upper.size_bytes


def test_the_digest_covers_what_lies_below_and_what_is_removed(images: Images) -> None:
    store = images.store
    one, two = add(store, "one", base), add(store, "two", writing("other"))
    same = writing("file")
    digests = [
        add(store, "a", same, one.digest).digest,
        add(store, "b", same, two.digest).digest,
        add(store, "c", same).digest,
        add(store, "d", removing("keep"), one.digest).digest,
        add(store, "e", lambda root: (root / "keep").mkdir(), one.digest).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert add(store, "f", same, one.digest).digest == digests[0]


def test_a_layer_is_kept_as_long_as_something_lies_on_it(images: Images) -> None:
    store = images.store
    lower = add(store, "lower", base)
    middle = add(store, "middle", writing("m"), lower.digest)
    upper = add(store, "upper", writing("u"), middle.digest)
    store.remove(name_of("lower"), Work())
    store.remove(name_of("middle"), Work())
    assert store.gc(Work()).digests == ()
    assert seen(upper)
    store.lease("sandbox", middle.digest, Work())
    store.remove(name_of("upper"), Work())
    assert roots(store) == {lower.digest, middle.digest}
    store.release("sandbox")
    assert set(store.gc(Work()).digests) == {lower.digest, middle.digest}
    assert roots(store) == set()


def test_an_image_that_lost_its_lower_layer_is_no_image(images: Images) -> None:
    store = images.store
    lower = add(store, "lower", base)
    upper = add(store, "upper", writing("u"), lower.digest)
    shutil.rmtree(lower.layers[0].parent)
    assert store.find(name_of("upper")) is None
    with pytest.raises(ImageNotFoundError):
        store.lease("sandbox", upper.digest, Work())
    with pytest.raises(ImageNotFoundError):
        add(store, "more", writing("m"), lower.digest)


def test_a_damaged_description_stops_gc_rather_than_lose_a_layer(images: Images) -> None:
    store = images.store
    lower = add(store, "lower", base)
    upper = add(store, "upper", writing("u"), lower.digest)
    store.remove(name_of("lower"), Work())
    (upper.layers[0].parent / "meta.json").write_text("{")
    with pytest.raises(ImageError, match="damaged"):
        store.gc(Work())
    assert roots(store) == {lower.digest, upper.digest}
    store.remove(name_of("upper"), Work())
    assert roots(store) == set()


@pytest.mark.parametrize("layer", [0, 1])
def test_verify_reads_every_layer(images: Images, layer: int) -> None:
    upper = add(images.store, "upper", writing("u"), add(images.store, "lower", base).digest)
    (upper.layers[layer] / "keep").mkdir(exist_ok=True)
    (upper.layers[layer] / "keep/added").touch()
    with pytest.raises(ImageError, match="changed on disk"):
        images.store.verify(name_of("upper"), Work())


def test_a_deep_stack_is_flattened_and_stays_what_it_was(images: Images) -> None:
    store = images.store
    image = expected = add(store, "base", base)
    changes: list[Fill] = [
        writing("fresh/a"), writing("fresh/b"), removing("fresh/a"),
        writing("new/a"), writing("keep/one", "1"), removing("gone"), writing("gone/other"), removing("new"),
        removing("keep"), writing("keep"), removing("keep"), writing("keep/three"),
    ]  # fmt: skip
    flat = store.directory.parent / "flat"
    shutil.copytree(image.layers[0], flat, symlinks=True)
    for number in range(MAX_LAYERS * 2):
        change = changes[number % len(changes)]
        image = add(store, f"n{number}", change, image.digest)
        assert len(image.layers) <= MAX_LAYERS
        assert image.layers[-1] == expected.layers[-1]
        _apply(change, flat)
        assert seen(image) == files(flat), number
        assert store.verify(image.reference, Work()).digest == image.digest


def _apply(change: Fill, flat: Path) -> None:
    """Do to a plain tree what a layer does to the ones below it."""
    layer = flat.parent / "layer"
    layer.mkdir()
    change(layer)
    for path in sorted(layer.rglob("*")):
        target, info = flat / path.relative_to(layer), path.lstat()
        is_directory = stat.S_ISDIR(info.st_mode)
        if os.path.lexists(target) and not (is_directory and target.is_dir()):
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        if is_directory:
            target.mkdir(exist_ok=True)
        elif stat.S_ISREG(info.st_mode):
            shutil.copyfile(path, target)
    shutil.rmtree(layer)


def test_stores_of_earlier_versions_are_read(images: Images) -> None:
    store = images.store
    old = add(store, "old", base)
    meta, record = old.layers[0].parent / "meta.json", next((store.directory / "names").iterdir())
    assert "below" not in json.loads(meta.read_text())
    values = json.loads(record.read_text())
    assert "stack" not in values
    del values["owner"]
    for key in ("labels", "exposed_ports", "volumes", "stop_signal", "shell", "healthcheck"):
        del values["config"][key]
    record.write_text(json.dumps(values))
    assert store.find(name_of("old")) == old
    upper = add(store, "upper", writing("u"), old.digest)
    assert len(upper.layers) == 2


def test_names_of_different_owners_do_not_collide(images: Images) -> None:
    store = images.store
    everybody, ada, bob = (add(store, "mine", writing("whose", owner), owner=owner) for owner in ("", "ada", "bob"))
    assert [store.find(name_of("mine"), owner) for owner in ("", "ada", "bob")] == [everybody, ada, bob]
    assert len({each.digest for each in (everybody, ada, bob)}) == 3
    store.remove(name_of("mine"), Work(), "ada")
    assert store.find(name_of("mine"), "ada") is None
    assert {image.owner for image in store.ls()} == {"", "bob"}


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_layer_cannot_replace_a_mount_point(images: Images, kind: str) -> None:
    def fill(root: Path) -> None:
        (root / "etc").symlink_to("/") if kind == "link" else (root / "etc").touch()

    lower = add(images.store, "lower", base)
    with pytest.raises(ImageError, match="/etc of the image is"):
        add(images.store, "upper", fill, lower.digest)
    assert len(roots(images.store)) == 1


def test_a_removed_mount_point_is_an_empty_directory(images: Images) -> None:
    lower = add(images.store, "lower", writing("tmp/file"))
    upper = add(images.store, "upper", removing("tmp"), lower.digest)
    with tree_view.view(upper.layers) as fd:
        info = os.stat("tmp", dir_fd=fd)
        assert stat.S_IMODE(info.st_mode) == 0o1777
        assert os.listdir(os.open("tmp", os.O_RDONLY, dir_fd=fd)) == []


def test_a_view_leads_nowhere_else_and_leaves_nothing(images: Images, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")

    def hostile(root: Path) -> None:
        (root / "link").symlink_to(tmp_path / "secret")
        (root / "up").symlink_to("../" * 40 + str(tmp_path / "secret"))
        (root / "magic").symlink_to("/proc/self/root")

    upper = add(images.store, "upper", hostile, add(images.store, "lower", base).digest)
    before = Path("/proc/self/mountinfo").read_text()
    with tree_view.view(upper.layers) as fd:
        assert Path("/proc/self/mountinfo").read_text() == before
        for name in (b"link", b"up", b"magic/etc"):
            with pytest.raises(OSError):  # noqa: PT011
                tree_view.open_in_root(fd, name, os.O_RDONLY)
    assert not os.path.exists(f"/proc/self/fd/{fd}")


_KILLED = """
import os, signal, sys
from pathlib import Path
from atoll.archive.work import Work
from atoll.images import Image, Kind
from atoll.images import image_store
from atoll.images.image_store import Store

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

store = Store(Path(sys.argv[1]))
points = [  # before the layer is described, is synced, has its place, has its name
    (store._roots.__class__, "description"), (image_store, "sync_tree"), (Path, "rename"), (Store, "_name"),
]
for place, name in points:
    child = os.fork()
    if not child:
        with store.draft(Work()) as draft:
            (draft.rootfs / "file").write_text("new")
            setattr(place, name, die)
            store.commit(draft, Image("docker.io/library/upper:latest", Kind.OCI), Work(), below=sys.argv[2])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, name
    assert store.find("docker.io/library/upper:latest") is None, name
"""


def test_killed_while_storing_a_layer(images: Images) -> None:
    store = images.store
    lower = add(store, "lower", base)
    subprocess.run([sys.executable, "-c", _KILLED, str(store.directory), lower.digest], check=True)
    store.gc(Work())
    assert roots(store) == {lower.digest}
    assert list((store.directory / "tmp").iterdir()) == []
    assert len(add(store, "upper", writing("file"), lower.digest).layers) == 2
