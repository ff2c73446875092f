"""Everything on this machine that belongs to an installation of the `oci` engine, which should be nothing."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.settings import Settings
from atoll.storage import open_layers


def remains(settings: Settings) -> list[str]:
    """Processes, namespaces, mounts, control groups, loop devices, subvolumes and files."""
    marks = [os.fsencode(settings.data_dir.parent), settings.installation_id()[:12].encode()]
    return [
        *_processes(marks),
        *_namespaces(),
        *(f"mount {line}" for line in _lines("/proc/self/mountinfo") if str(settings.data_dir) in line),
        *_groups(settings),
        *_loops(settings),
        *_layers(settings),
        *_files(settings),
    ]


def _processes(marks: list[bytes]) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            # What names the folder in its arguments or sees it among its mounts may be a program that looks on.
            seen = (entry / "cgroup").read_bytes() + (entry / "cmdline").read_bytes().partition(b"\0")[0]
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX" and int(parent) != os.getpid():
                continue  # dead; the machine's first process will notice
            if any(mark in seen for mark in marks):
                found.append(f"process {entry.name} {(entry / 'cmdline').read_bytes()[:100]!r}")
        except OSError:
            continue
    return found


def _namespaces() -> list[str]:
    """Those that this process holds open: others live as long as a process or a mount, which are counted."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    return [f"namespace {link}" for link in links if link.startswith(("mnt:", "user:", "net:", "pid:", "ipc:", "uts:"))]


def _groups(settings: Settings) -> list[str]:
    hierarchy = Hierarchy.find()
    name = f"atoll-{settings.installation_id()[:12]}"
    places = {*hierarchy.controllers.values(), *hierarchy.others}
    return [f"group {place / name}" for place in sorted(places) if (place / name).exists()]


def _loops(settings: Settings) -> list[str]:
    """Those that do not go by themselves. While a stranger's mount namespace has a copy of a mount, which is made with
    the namespace, the device stays; it goes with the last copy."""
    found = []
    for loop in Path("/sys/block").glob("loop*/loop"):
        try:
            ours = str(settings.data_dir) in (loop / "backing_file").read_text()
            if ours and (loop / "autoclear").read_text().strip() != "1":
                found.append(f"loop device {loop.parts[3]}")
        except OSError:
            continue
    return found


def _layers(settings: Settings) -> list[str]:
    layers = open_layers(settings.data_dir)
    try:
        return [f"layer {name}" for name in layers.list()]
    finally:
        layers.close()


def _files(settings: Settings) -> list[str]:
    data = settings.data_dir
    folders = (data / "oci/sandboxes", data / "oci/ids", data / "images/leases", settings.run_dir / "oci")
    drafts = [*(data / "oci").glob("*/.*"), *data.glob(".*")]
    return [f"file {path}" for path in (*drafts, *(path for folder in folders for path in folder.glob("*")))]


def _lines(path: str) -> list[str]:
    return Path(path).read_text(errors="replace").splitlines()
