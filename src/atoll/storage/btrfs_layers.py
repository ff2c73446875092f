"""Writable layers as subvolumes of btrfs, each with a quota.

Each sandbox has one account, a quota for the sum of its layer, its saved states, and those of its former layers from
which something is still kept. An extent counts for the subvolume that wrote it until the last reference to it is gone,
so deleting a saved state frees exactly the data that nothing else uses. Beside each layer are `.<id>.account`, a
symbolic link whose target is the number of the account, and `.<id>.kept` once a state of the current layer was saved.

btrfs counts bytes for each subvolume and refuses a write over the limit immediately. It does not count inodes, so there
is no limit on inodes; but an empty file uses metadata, which the byte limit counts, so their number is limited, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll.archive import tree
from atoll.errors import EngineError
from atoll.storage import btrfs
from atoll.storage.layers import Layer, Layers, PlainLayers, checked, make_parts, names_in
from atoll.storage.storage_pool import StoragePool, can_make_pool, existing
from atoll.storage.volume_folder import ACCOUNTS

_NEARLY_FULL = 0.98
_ROOM_TO_START = 4 << 20
_ACCOUNT = ".account"
_KEPT = ".kept"


def open_layers(data_dir: Path) -> Layers:
    """Return btrfs layers with quotas if this process can create them, otherwise plain directories."""
    if os.geteuid() == 0 and (btrfs.is_btrfs(existing(data_dir)) or can_make_pool()):
        return BtrfsLayers(data_dir)
    return PlainLayers(data_dir / "layers")


@dataclass(frozen=True, slots=True)
class BtrfsLayers:
    """An implementation of `Layers`."""

    data_dir: Path
    enforces_disk: bool = True
    can_save: bool = True

    def create_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None = None) -> Layer:
        with self._pool.opened() as directory:
            path = directory / checked(layer_id)
            if path.exists():
                raise EngineError(f"there is already a layer '{layer_id}'")
            self._forget_account(directory, layer_id)
            account = self._open_account(directory, layer_id, disk_bytes) if disk_bytes is not None else None
            self._fill(path, origin, account)
        return Layer(layer_id, path)

    def replace_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None) -> _Replacement:
        with self._pool.opened() as directory:
            draft = directory / f".{checked(layer_id)}.next"
            self._remove(draft)
            account = self._account(directory, layer_id)
            if account is None and disk_bytes is not None:  # the layer was made by an earlier version of Atoll
                account = self._adopt(directory, layer_id, disk_bytes)
            # The draft joins the account only after it is filled, so filling it cannot fail because of the limit.
            self._fill(draft, origin, None)
            if account is not None:
                self._make_room(directory, account)
                btrfs.assign(draft, account, counted=True)
        return _Replacement(partial(self._commit, layer_id), partial(self._forget_draft, layer_id))

    def _commit(self, layer_id: str) -> None:
        with self._pool.opened() as directory:
            draft = directory / f".{layer_id}.next"
            try:
                btrfs.exchange(draft, directory / layer_id)
            except OSError as error:
                raise EngineError(f"the layer '{layer_id}' could not be replaced: {error}") from error
            self._discard(directory, layer_id, draft)

    def _forget_draft(self, layer_id: str) -> None:
        with self._pool.opened() as directory:
            self._remove(directory / f".{layer_id}.next")

    def limit(self, layer_id: str, disk_bytes: int | None) -> None:
        with self._pool.opened() as directory:
            account = self._account(directory, checked(layer_id))
            if account is not None and disk_bytes is not None:
                btrfs.limit_account(directory, account, disk_bytes)

    def open_layer(self, layer_id: str) -> Layer:
        with self._pool.opened() as directory:
            path = directory / checked(layer_id)
            if not path.is_dir():
                raise EngineError(f"there is no layer '{layer_id}'")
            try:
                _forget_work(path)
            except OSError as error:
                raise EngineError(f"the layer '{layer_id}' cannot be used again: {error}") from error
            return Layer(layer_id, path)

    def save(self, layer_id: str, saved_id: str) -> None:
        with self._pool.opened() as directory:
            (directory / f".{checked(layer_id)}{_KEPT}").touch()
            try:
                self._keep(directory / layer_id, saved_id, self._account(directory, layer_id))
            finally:
                self._forget_kept(directory, layer_id)  # if another process has deleted the layer meanwhile

    def copy_saved(self, saved_id: str, new_id: str) -> None:
        with self._pool.opened():
            self._keep(self._saved / checked(saved_id), new_id)

    def make_saved(self, saved_id: str, fill: Callable[[Path], None]) -> None:
        with self._pool.opened():
            self._saved.mkdir(mode=0o700, exist_ok=True)
            draft = self._saved / f".{checked(saved_id)}.{os.getpid()}"
            self._remove(draft)
            try:
                self._fill(draft, None)
                fill(draft)
                os.rename(draft, self._saved / saved_id)
            except OSError as error:
                raise EngineError(f"a state could not be saved: {error}") from error
            finally:
                self._remove(draft)

    def delete_saved(self, saved_id: str) -> None:
        checked(saved_id)
        if self._pool.exists():
            with self._pool.opened() as directory:
                for path in (self._saved / saved_id, *self._saved.glob(f".{saved_id}.*")):
                    self._remove(path)
                btrfs.free_soon(directory)

    def list_saved(self) -> list[str]:
        if not self._pool.exists():
            return []
        with self._pool.opened():
            drafts = {path.name.split(".")[1] for path in self._saved.glob(".*.*")}
            return sorted(drafts.union(names_in(self._saved)))

    @contextmanager
    def looking(self, name: str, *, saved: bool) -> Iterator[Path]:
        with self._pool.opened() as directory:
            yield (self._saved if saved else directory) / checked(name)

    def _keep(self, source: Path, saved_id: str, account: int | None = None) -> None:
        try:
            self._saved.mkdir(mode=0o700, exist_ok=True)
            btrfs.snapshot(source, self._saved / checked(saved_id), read_only=True, account=account)
        except OSError as error:
            raise EngineError(f"the state of '{source.name}' could not be saved: {error}") from error

    def _fill(self, path: Path, origin: str | None, account: int | None = None) -> None:
        """Create a subvolume that can serve as a layer. A failure leaves nothing behind."""
        try:
            if origin is None:
                btrfs.create_subvolume(path, account)
            else:
                btrfs.snapshot(self._saved / checked(origin), path, account=account)
            path.chmod(0o700)
            if origin is not None:
                _forget_work(path)
            else:
                make_parts(path)
        except FileNotFoundError as error:
            self._remove(path)
            raise EngineError(f"there is nothing saved as '{origin}'") from error
        except OSError as error:
            self._remove(path)
            raise EngineError(f"a writable layer could not be made: {error}") from error

    def delete_layer(self, layer_id: str) -> None:
        checked(layer_id)
        if not self._pool.exists():
            return
        with self._pool.opened() as directory:
            self._remove(directory / layer_id)
            self._remove(directory / f".{layer_id}.next")
            self._forget_account(directory, layer_id)

    def usage(self, layer_id: str) -> int | None:
        quota = self._quota(layer_id)
        return quota.used_bytes if quota is not None else None

    def account_usage(self, layer_id: str) -> int | None:
        account = self._account(self._pool.directory, checked(layer_id))
        quota = btrfs.account_quota(self._pool.directory, account) if account is not None else None
        return quota.used_bytes if quota is not None else None

    def sweep(self) -> None:
        if not self._pool.directory.is_dir():
            return
        with self._pool.opened() as directory:
            btrfs.forget_empty_quotas(directory)
            # List the accounts before their names: the name of an account is created before the account.
            there = btrfs.accounts(directory)
            hidden = [name for name in os.listdir(directory) if name.startswith(".")]
            for name in hidden:
                if name.endswith(_KEPT):
                    self._forget_kept(directory, name[1 : -len(_KEPT)])
            names = [name for name in hidden if name.endswith(_ACCOUNT)]
            named = {self._account(directory, name[1 : -len(_ACCOUNT)]) for name in names}
            for number in there:
                if number not in named and number < ACCOUNTS:  # the others belong to volumes
                    btrfs.remove_account(directory, number)

    def is_full(self, layer_id: str) -> bool:
        account = self._account(self._pool.directory, checked(layer_id))
        quota = self._quota(layer_id) if account is None else btrfs.account_quota(self._pool.directory, account)
        if quota is None or quota.limit_bytes is None:
            return False
        # The kernel refuses a write as a whole, so a little space may be left.
        return quota.used_bytes >= quota.limit_bytes * _NEARLY_FULL

    def _quota(self, layer_id: str) -> btrfs.Quota | None:
        try:
            return btrfs.quota(self._pool.directory / checked(layer_id))
        except OSError:
            return None

    def list(self) -> list[str]:
        if not self._pool.exists():
            return []
        with self._pool.opened() as directory:
            return names_in(directory)

    def close(self) -> None:
        self._pool.close()

    # --- its parts -------------------------------------------------------------------------------------------------

    @property
    def _pool(self) -> StoragePool:
        return StoragePool(self.data_dir)

    @property
    def _saved(self) -> Path:
        return self._pool.directory.with_name("saved")

    def _account(self, directory: Path, layer_id: str) -> int | None:
        """Return the number of the layer's account, or None if it has none."""
        try:
            return int(os.readlink(f"{directory}/.{layer_id}{_ACCOUNT}"))
        except (OSError, ValueError):
            return None

    def _open_account(self, directory: Path, layer_id: str, disk_bytes: int) -> int:
        # A random number makes it unnecessary to record which numbers were used. The name is created before the
        # account, so that `sweep` in another process does not remove the account as a leftover.
        number = int.from_bytes(os.urandom(5)) + 1
        try:
            os.symlink(str(number), f"{directory}/.{layer_id}{_ACCOUNT}")
            btrfs.create_account(directory, number)
            btrfs.limit_account(directory, number, disk_bytes)
        except OSError as error:
            raise EngineError(f"the disk limit of '{layer_id}' cannot be set: {error}") from error
        return number

    def _adopt(self, directory: Path, layer_id: str, disk_bytes: int) -> int:
        """Open an account for an existing layer that has none, and count the layer's content in it."""
        (directory / f".{layer_id}{_KEPT}").touch()
        number = self._open_account(directory, layer_id, disk_bytes)
        btrfs.assign(directory / layer_id, number, counted=True)
        return number

    def _make_room(self, directory: Path, account: int) -> None:
        quota = btrfs.account_quota(directory, account)
        if quota is not None and quota.limit_bytes is not None:
            most = max(quota.limit_bytes, quota.used_bytes + _ROOM_TO_START)
            btrfs.limit_account(directory, account, most)

    def _forget_account(self, directory: Path, layer_id: str) -> None:
        """Remove the layer's account. If data still counts in it, because forks use it or the kernel has not freed it
        yet, `sweep` removes the account later."""
        account = self._account(directory, layer_id)
        for name in (_ACCOUNT, _KEPT):
            (directory / f".{layer_id}{name}").unlink(missing_ok=True)
        if account is not None:
            btrfs.remove_account(directory, account)

    @staticmethod
    def _forget_kept(directory: Path, layer_id: str) -> None:
        """Forget that states of a layer were saved, if there is no such layer."""
        if not (directory / layer_id).exists():
            (directory / f".{layer_id}{_KEPT}").unlink(missing_ok=True)

    def _discard(self, directory: Path, layer_id: str, old: Path) -> None:
        """Remove the former content of a layer.

        If no state of it was saved, it stops counting immediately, although the kernel frees the space later. Otherwise
        it counts until the kernel has freed what no saved state uses.
        """
        account, kept = self._account(directory, layer_id), directory / f".{layer_id}{_KEPT}"
        if account is not None and not kept.exists():
            btrfs.assign(old, account, counted=False)
        self._remove(old)
        kept.unlink(missing_ok=True)
        btrfs.free_soon(directory)

    def _remove(self, path: Path) -> None:
        try:
            if btrfs.is_subvolume(path):
                btrfs.delete_subvolume(path)
            elif path.exists():
                tree.remove(path)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
            # Another process removed it meanwhile.
        except OSError as error:
            raise EngineError(f"the layer '{path.name}' could not be removed: {error}") from error


def _forget_work(path: Path) -> None:
    """Empty overlayfs's work directory, which may contain a mark that forbids mounting again after a crash."""
    tree.remove(path / "work")
    (path / "work").mkdir(mode=0o700)


@dataclass(frozen=True, slots=True)
class _Replacement:
    """The prepared subvolume of a replacement. Its name is hidden from `list`, and one left by a crash is recreated."""

    commit: Callable[[], None]
    discard: Callable[[], None]
