"""A program that changes volumes without end, in children which it kills at some moment, and looks at what is left."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

from atoll.errors import SandboxError
from atoll.resources import VolumeSizes
from atoll.storage import BtrfsLayers, Volumes, btrfs


def change(volumes: Volumes, first: int) -> None:
    for number in itertools.count(first):
        try:
            path = volumes.use("ann", "data", "s", read_only=False)
            (path / "whole").write_text("whole")
            volumes.copy("ann", "data", f"copy{number % 3}", read_only=number % 2 == 0)
            volumes.restore("ann", "data", f"copy{number % 3}")
            volumes.remove("ann", f"copy{number % 3}")
            if number % 5 == 0:
                volumes.remove("ann", "data")
        except SandboxError:  # left by the one before
            volumes.remove("ann", f"copy{number % 3}")


def look(volumes: Volumes) -> None:
    for record in volumes.list(None):
        path = volumes.use("ann", record.name, "s", read_only=record.read_only)
        quota = btrfs.quota(path)
        assert quota is not None, record
        assert quota.limit_bytes, record
        assert not record.source or (path / "whole").exists(), record  # a copy is never without its content
    volumes.sweep()
    home = volumes.data_dir / "pool/volumes"
    assert sorted(path.name for path in home.glob("*/data/*")) == sorted(each.id for each in volumes.list(None))


def main(folder: Path, kills: int) -> None:
    volumes = Volumes(folder, VolumeSizes(64 << 20), lambda _: False)
    with BtrfsLayers(folder).looking("x", saved=False):  # so that it stays mounted
        for number in range(kills):
            child = os.fork()
            if not child:
                change(volumes, number)
            time.sleep(0.0017 * (number % 23))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            look(volumes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
