"""The steps of builds: saved states under keys, from which later steps of builds start, and which become images.

    steps/<id>.json, steps/<id>.users/   the records, as of other saved states (`saved_state.py`)
    steps/<key>.step                     a symbolic link whose target is the id; its time is that of the last use

A step belongs to no sandbox. It is complete once its link exists: a record without one was left by a process that died,
and is removed. If two processes make the same step, the first one's is kept.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.layer_copy import copy_layer
from atoll.archive.work import Work
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.states.saved_state import LEASE, SavedState
from atoll.engines.linux.states.state_storage import StateStorage
from atoll.engines.linux.states.step_names import STEP, checked_key, is_key
from atoll.errors import ImageNotFoundError, SpecError
from atoll.images import Image, ImageConfig, Kind, tree_view

INNER = "rootfs"
MAX_STEPS = 5_000
"""How many steps are kept, however small they are."""
_LINK = ".step"
_RECENT_S = 3600.0
"""Steps that were used within this time are not removed on their own: a build may be using them."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STUBS = (
    b"root",
    b"run",
    b"tmp",
    b"etc/resolv.conf",
    b"etc/ssl/certs/ca-certificates.crt",
    b"etc/ssl/certs",
    b"etc/ssl",
    b".atoll-agent",
)
"""What Atoll mounts over files of an image, or makes at the start of every sandbox, where the image has none."""


@dataclass(frozen=True, slots=True)
class Steps:
    """All methods block."""

    layout: SandboxLayout
    storage: StateStorage

    def named(self, image: str) -> SavedState:
        """Return the step that `step:KEY` stands for. Raises ImageNotFoundError."""
        key = checked_key(image.removeprefix(STEP))
        saved = self._find(key)
        if saved is None:
            raise ImageNotFoundError(f"there is no step {key[:12]}… of a build any more", hint="Build it again.")
        return saved

    def has(self, key: str) -> bool:
        return self._find(checked_key(key)) is not None

    def save(self, record: Record, key: str) -> None:
        if self.has(key):
            return
        base = self.storage.base_of(record)
        if not base.digest:
            raise SpecError(
                "a sandbox of the image 'host' cannot become an image", hint="Start from an image of its own."
            )
        records = self.storage.steps
        with self.storage.new_id(records) as saved_id:
            self.layout.layers.save(record.sandbox_id, saved_id)
            # The lease need not outlive a crash of the machine: a step without its image is not used.
            self.layout.images.store.lease(LEASE + saved_id, base.digest, Work(), sync=False)
            written = self.layout.layers.usage(record.sandbox_id) or 0
            step = SavedState(
                id=saved_id, kind="step", name=key, created_at=time.time(), made_by="build",
                size_bytes=record.inherited_bytes + written, own_bytes=written, base=base, runtime=record.runtime,
                stubs=self._stubs(record),
            )  # fmt: skip
            with records.locked():
                if self._find(key) is None:
                    records.write(step)
                    self._link(key, saved_id)

    @contextmanager
    def view(self, key: str) -> Iterator[int]:
        saved = self.named(key)
        layers = self.layout.images.store.layers(saved.base.digest)
        with self.layout.layers.looking(saved.id, saved=True) as path:
            upper = path / "upper" / INNER
            with tree_view.view(layers, upper if upper.is_dir() else None) as fd:
                yield fd

    def commit(self, key: str, name: str, config: ImageConfig, owner: str, work: Work) -> Image:
        """Store the files of a step as an image, see `Building.commit_step`."""
        images, saved = self.layout.images, self.named(key)
        reference = images.parse(name)
        if reference.kind is not Kind.OCI:
            raise SpecError(f"{name!r} already means something else", hint="Choose a name such as mine or team/mine:1.")
        image = Image(str(reference), reference.kind, config=config, source=f"{STEP}{key}", owner=owner)
        store, below = images.store, saved.base.digest
        with (
            self.layout.layers.looking(saved.id, saved=True) as path,
            store.making(f"{owner}\0{reference}" if owner else str(reference), work),
            store.draft(work) as draft,
        ):
            try:
                fd = os.open(path / "upper" / INNER, _OPEN)
            except FileNotFoundError:  # nothing was written
                return store.name(image, below, work)
            try:
                with tree_view.view(store.layers(below)) as lower:
                    stubs = (*_STUBS, *(os.fsencode(path) for path in saved.stubs))
                    done = copy_layer(fd, draft.rootfs, lower, Budget(ImageLimits()), work, stubs=stubs)
                    if not os.listdir(draft.rootfs) and _same(os.fstat(fd), os.fstat(lower)):
                        return store.name(image, below, work)
            finally:
                os.close(fd)
            return store.commit(draft, image.with_notes(tuple(done.notes)), work, below=below)

    def prune(self, keep_bytes: int | None, unused_s: float) -> int:
        # A flood of new steps must not fill the disk just because they are new.
        most = float("inf") if keep_bytes is not None else 2 * self.most_bytes()
        keep_bytes = self.most_bytes() if keep_bytes is None else keep_bytes
        found = sorted(self._links(), key=lambda link: link.used_at)
        total, count, freed, now = sum(link.saved.own_bytes for link in found), len(found), 0, time.time()
        for link in found:
            if total <= keep_bytes and count <= MAX_STEPS:
                break
            recent = unused_s > 0 and now - link.used_at < unused_s and total <= most
            if recent or self.storage.steps.is_used(link.saved.id):
                continue
            link.path.unlink(missing_ok=True)
            if self.storage.steps.forget(link.saved.id):
                self.storage.remove(link.saved.id)
            total, count, freed = total - link.saved.own_bytes, count - 1, freed + link.saved.own_bytes
        return freed

    def most_bytes(self) -> int:
        """Return how much all steps together may take."""
        with contextlib.suppress(OSError), self.layout.layers.looking("x", saved=True) as place:
            disk = os.statvfs(place.parent.parent)
            return min(self.layout.settings.step_cache_bytes, disk.f_blocks * disk.f_frsize // 4)
        return self.layout.settings.step_cache_bytes

    def collect(self) -> list[str]:
        """Remove steps that were left half made, those whose image or files are gone, and those that are too many."""
        if not self.storage.steps.directory.is_dir():
            return []
        records, removed = self.storage.steps, []
        for path in records.directory.glob(f"*{_LINK}"):
            if is_key(key := path.name.removesuffix(_LINK)) and self._find(key, touch=False) is None:
                path.unlink(missing_ok=True)
        with records.locked():
            linked = {link.saved.id for link in self._links()}
            left = [saved.id for saved in records.all() if saved.kind == "step" and saved.id not in linked]
        for saved_id in left:
            if records.forget(saved_id):
                self.storage.remove(saved_id)
                removed.append(f"incomplete step {saved_id}")
        if freed := self.prune(None, _RECENT_S):
            removed.append(f"steps of builds with {freed:,} bytes")
        return removed

    # --- its parts ---------------------------------------------------------------------------------------------------

    def _find(self, key: str, *, touch: bool = True) -> SavedState | None:
        """Return the step of this key, if it is complete, and count that as a use unless `touch` is off."""
        path = self._path(key)
        try:
            saved = self.storage.steps.read(os.readlink(path))
            if saved is None or saved.kind != "step" or saved.name != key:
                return None
            with self.layout.layers.looking(saved.id, saved=True) as files:
                if not files.is_dir() or not self.layout.images.store.root(saved.base.digest).is_dir():
                    return None
            if touch:
                os.utime(path, follow_symlinks=False)
        except (OSError, SpecError):
            return None
        return saved

    def _stubs(self, record: Record) -> tuple[str, ...]:
        """Return the paths that may exist only because something was mounted there, in this step or an earlier one."""
        origin = self.storage.read(record.origin) if record.origin is not None else None
        found = set(origin.stubs if origin is not None else ())
        for volume in record.spec.volumes:
            parts = volume.path.strip("/").split("/")
            found |= {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return tuple(sorted(found))

    def _link(self, key: str, saved_id: str) -> None:
        draft = self.storage.steps.directory / f".{saved_id}{_LINK}"
        draft.symlink_to(saved_id)
        draft.rename(self._path(key))

    def _path(self, key: str) -> Path:
        return self.storage.steps.directory / f"{key}{_LINK}"

    def _links(self) -> list[_Link]:
        found = []
        for path in self.storage.steps.directory.glob(f"*{_LINK}"):
            with contextlib.suppress(OSError, SpecError):
                saved = self.storage.steps.read(os.readlink(path))
                if saved is not None and saved.name == path.name.removesuffix(_LINK):
                    found.append(_Link(path, saved, path.lstat().st_mtime))
        return found


@dataclass(frozen=True, slots=True)
class _Link:
    path: Path
    saved: SavedState
    used_at: float


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_mode, one.st_uid, one.st_gid) == (other.st_mode, other.st_uid, other.st_gid)
