"""The volumes of one owner, as files in the storage pool:

    lock                       held by whoever changes anything here
    account                    a symbolic link to the number of the account in which all of them count
    records/NAME.json          a volume; it exists exactly as long as this file
    data/ID                    its subvolume
    users/ID/SANDBOX           the sandboxes that mount it, each recorded before its first process starts

A subvolume is complete before its record is written, and its record is removed before it. So whatever is killed, and
whenever, a subvolume without a record is a leftover, which `sweep` removes, and a record stands for a whole volume.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from atoll import durable
from atoll.archive import tree
from atoll.errors import EngineError
from atoll.storage import btrfs
from atoll.storage.volume_rules import VolumeRecord

_PAUSE_S = 0.01
_WAIT_S = 30.0
_CACHES_BYTES = 40 << 30
ACCOUNTS = 1 << 41
"""Accounts of volumes have numbers from here on; those of sandboxes have smaller ones."""


@dataclass(frozen=True, slots=True)
class VolumeFolder:
    path: Path

    # --- records ----------------------------------------------------------------------------------------------------

    def read(self, name: str) -> VolumeRecord | None:
        try:
            return VolumeRecord.model_validate_json((self.path / "records" / f"{name}.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def read_all(self) -> list[VolumeRecord]:
        names = [name.removesuffix(".json") for name in _names(self.path / "records") if name.endswith(".json")]
        return [record for name in sorted(names) if (record := self.read(name)) is not None]

    def write(self, record: VolumeRecord) -> None:
        durable.write(self.path / "records" / f"{record.name}.json", record.model_dump_json(), sync=True)

    def forget(self, record: VolumeRecord) -> None:
        (self.path / "records" / f"{record.name}.json").unlink(missing_ok=True)
        durable.sync_directory(self.path / "records")

    def touch(self, record: VolumeRecord) -> None:
        """Remember that the volume is used now."""
        with suppress(OSError):
            os.utime(self.path / "records" / f"{record.name}.json")

    def used_at(self, record: VolumeRecord) -> float:
        try:
            return (self.path / "records" / f"{record.name}.json").stat().st_mtime
        except OSError:
            return 0.0

    def data(self, record: VolumeRecord) -> Path:
        return self.path / "data" / record.id

    # --- users ------------------------------------------------------------------------------------------------------

    def add_user(self, record: VolumeRecord, sandbox_id: str) -> None:
        users = self.path / "users" / record.id
        users.mkdir(mode=0o700, parents=True, exist_ok=True)
        (users / sandbox_id).touch()

    def remove_user(self, volume_id: str, sandbox_id: str) -> None:
        (self.path / "users" / volume_id / sandbox_id).unlink(missing_ok=True)

    def users(self, record: VolumeRecord) -> list[str]:
        return sorted(_names(self.path / "users" / record.id))

    # --- the account ------------------------------------------------------------------------------------------------

    def account(self) -> int:
        """Return the number of the account, which is opened if it is missing. Its name is written first."""
        try:
            number = int(os.readlink(self.path / "account"))
        except FileNotFoundError:
            number = ACCOUNTS + int.from_bytes(os.urandom(5))
            os.symlink(str(number), self.path / "account")
        with suppress(FileExistsError):
            btrfs.create_account(self.path, number)
        return number

    def limit_account(self, more_bytes: int = 0) -> None:
        """Let all volumes together take as much as they may one by one, and `more_bytes` for one that is about to be
        made. Data that outlives its volume, because another volume refers to it, counts here as well. Caches may take
        less together than one by one."""
        records = self.read_all()
        caches = min(_CACHES_BYTES, sum(record.size_bytes for record in records if record.is_cache))
        sizes = more_bytes + caches + sum(record.size_bytes for record in records if not record.is_cache)
        with suppress(OSError):
            btrfs.limit_account(self.path, self.account(), max(sizes, 1 << 20))

    # --- the lock ---------------------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of this owner. Raises EngineError if another process holds it for too long."""
        fd = self._locked()
        try:
            for name in ("records", "data", "users"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            yield
        finally:
            os.close(fd)

    def _locked(self) -> int:
        until = time.monotonic() + _WAIT_S
        while True:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # `sweep` has just removed the empty directory
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file(fd, self.path / "lock"):
                    return fd
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(fd)
                    raise EngineError(
                        "another process has been changing volumes for too long", hint="Try again later."
                    ) from None
                time.sleep(_PAUSE_S)
            os.close(fd)

    # --- leftovers --------------------------------------------------------------------------------------------------

    def looks_clean(self) -> bool:
        """Return whether there is one subvolume for each record, and at least one, without taking the lock."""
        records = sum(name.endswith(".json") and not name.startswith(".") for name in _names(self.path / "records"))
        return records == len(_names(self.path / "data")) > 0

    def sweep(self) -> list[str]:
        """Remove what belongs to no volume, and the directory itself if there is no volume. Return what was removed.
        The caller holds the lock."""
        durable.remove_abandoned(self.path / "records")
        ids = {record.id for record in self.read_all()}
        removed = []
        for name in _names(self.path / "data"):
            if name not in ids:
                remove_subvolume(self.path / "data" / name)
                removed.append(f"volume data {name}")
        for name in _names(self.path / "users"):
            if name not in ids:
                tree.remove(self.path / "users" / name)
        if not ids and not _names(self.path / "records"):
            with suppress(OSError):
                self._remove()
        return removed

    def remove_data(self, record: VolumeRecord) -> None:
        remove_subvolume(self.data(record))
        tree.remove(self.path / "users" / record.id)

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            number = int(os.readlink(self.path / "account"))
            btrfs.forget_empty_quotas(self.path)
            if not btrfs.remove_account(self.path, number):
                return  # something still counts there: the kernel has not freed it yet
            (self.path / "account").unlink()
        for name in ("records", "data", "users"):
            (self.path / name).rmdir()
        (self.path / "lock").unlink()
        self.path.rmdir()


def remove_subvolume(path: Path) -> None:
    try:
        if btrfs.is_subvolume(path):
            btrfs.delete_subvolume(path)
        elif os.path.lexists(path):
            tree.remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise EngineError(f"the data of a volume could not be removed: {error}") from error


def _is_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
