"""Whether the storage of a Docker engine can limit the disk of a container, and what the limit counts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from atoll.errors import UnsupportedError
from atoll.model import SandboxSpec

_COUNT_ALL = ("btrfs", "devicemapper")
"""Drivers whose limit counts all that the container sees, including the files of its image."""
_COUNT_WRITTEN = ("zfs",)
_SNAPSHOTTER = "io.containerd.snapshotter.v1"


@dataclass(frozen=True, slots=True)
class Storage:
    problem: str = ""
    """Why the disk cannot be limited; empty if it can."""
    counts_image: bool = False

    def size(self, disk_bytes: int, image_bytes: int) -> int:
        """Return the size to request from the Docker engine so that a sandbox can write `disk_bytes`."""
        return disk_bytes + image_bytes if self.counts_image else disk_bytes


def storage_of(info: dict[str, Any]) -> Storage:
    """Find out about the storage from the Docker engine's description of itself."""
    driver = str(info.get("Driver") or "unknown")
    status = dict(pair for pair in info.get("DriverStatus") or () if len(pair) == 2)
    if status.get("driver-type") == _SNAPSHOTTER:  # snapshotters accept the option and ignore it
        return Storage(f"its images are kept by containerd's snapshotter '{driver}', which has no limits")
    if driver in _COUNT_ALL or driver in _COUNT_WRITTEN:
        return Storage(counts_image=driver in _COUNT_ALL)
    if driver != "overlay2":
        return Storage(f"its storage driver '{driver}' has no limits")
    backing = str(status.get("Backing Filesystem") or "unknown")
    if backing != "xfs":
        return Storage(f"its storage driver 'overlay2' has limits on xfs only, not on {backing}")
    # The engine does not report whether its xfs has project quotas; this machine's mounts do, if it is the engine's
    # too.
    if not _project_quota(info.get("DockerRootDir")):
        return Storage("the xfs under its storage driver 'overlay2' is not mounted with pquota")
    return Storage()


def check_volumes(spec: SandboxSpec, volumes: tuple[str, ...]) -> None:
    """Raise UnsupportedError if the image declares volumes, which the Docker engine keeps elsewhere, without a
    limit."""
    if spec.limits.disk_bytes is not None and volumes:
        raise UnsupportedError(
            f"engine 'docker' cannot enforce disk with image '{spec.image}': the image declares volumes "
            f"({', '.join(volumes[:5])}), which Docker keeps outside of the container's disk",
            hint="Leave the disk limit out, or use an image without VOLUME.",
        )


def _project_quota(root_dir: object) -> bool:
    if not isinstance(root_dir, str) or not os.path.isdir(root_dir):
        return False
    device = os.stat(root_dir).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", errors="replace") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == wanted and {"prjquota", "pquota"} & set(fields[-1].split(",")):
                return True
    return False
