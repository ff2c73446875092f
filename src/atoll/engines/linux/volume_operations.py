"""Named volumes of a Linux engine: `NamedVolumes` over the storage pool."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.linux.layout import SandboxLayout
from atoll.errors import UnsupportedError
from atoll.model import Capability
from atoll.model.volume import VolumeInfo
from atoll.storage import VolumeRecord


class VolumeOperations:
    name: str
    layout: SandboxLayout

    async def create_volume(self, name: str, *, size_bytes: int | None = None, owner: str = "") -> VolumeInfo:
        self._need_volumes()
        return self._info(
            await finish(workers.run(workers.ENGINE, self.layout.volumes.create, owner, name, size_bytes))
        )

    async def copy_volume(
        self, source: str, name: str, *, read_only: bool = False, size_bytes: int | None = None, owner: str = ""
    ) -> VolumeInfo:
        self._need_volumes()

        def copy() -> VolumeRecord:
            return self.layout.volumes.copy(owner, source, name, size_bytes=size_bytes, read_only=read_only)

        return self._info(await finish(workers.run(workers.ENGINE, copy)))

    async def restore_volume(self, name: str, source: str, *, owner: str = "") -> VolumeInfo:
        self._need_volumes()
        return self._info(await finish(workers.run(workers.ENGINE, self.layout.volumes.restore, owner, name, source)))

    async def volumes(self, *, owner: str | None = "") -> Sequence[VolumeInfo]:
        def found() -> builtins.list[VolumeInfo]:
            return [self._info(record) for record in self.layout.volumes.list(owner)]

        return await workers.run(workers.ENGINE, found) if self._has_volumes() else []

    async def volume(self, name: str, *, owner: str = "") -> VolumeInfo:
        self._need_volumes()

        def found() -> VolumeInfo:
            record = self.layout.volumes.get(owner, name)
            return self._info(record, self.layout.volumes.users(record))

        return await workers.run(workers.ENGINE, found)

    async def remove_volume(self, name: str, *, owner: str = "") -> None:
        self._need_volumes()
        await finish(workers.run(workers.ENGINE, self.layout.volumes.remove, owner, name))

    def _info(self, record: VolumeRecord, users: Sequence[str] = ()) -> VolumeInfo:
        return VolumeInfo(
            name=record.name,
            created_at=record.created_at,
            size_bytes=record.size_bytes,
            used_bytes=self.layout.volumes.used_bytes(record),
            read_only=record.read_only,
            source=record.source or None,
            users=tuple(users),
            owner=record.owner,
        )

    def _has_volumes(self) -> bool:
        return Capability.NAMED_VOLUMES in self.layout.capabilities()

    def _need_volumes(self) -> None:
        if not self._has_volumes():
            raise UnsupportedError(
                f"engine '{self.name}' has no named volumes here",
                hint="They need btrfs: root, mkfs.btrfs (apt-get install btrfs-progs) and a loop device.",
            )
