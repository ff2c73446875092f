"""Sparse files cost what is in them, on the way in and out."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import sparse
from fairness.conftest import Court
from fairness.test_memory import unchecked
from fairness.test_threads import PROMPT_S, round_trip

HUGE = 256 << 20
SMALL = 64 << 20


class Disk:
    """The most that lay in the server's directory for transfers while it was watched."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.most_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Disk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.most_bytes = max(self.most_bytes, used(self._folder))


def used(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total


@pytest.fixture
def transfers(court: Court) -> Path:
    return court.server.folder / "state" / "transfers"


def test_a_sparse_tree_comes_out_at_no_cost(court: Court, transfers: Path) -> None:
    sandbox = court.sandbox(court.mallory)
    made = court.mallory.post(f"{sandbox}/exec", json={"command": f"mkdir d; echo x > d/a; truncate -s {HUGE} d/huge"})
    assert made.json()["success"]
    court.long_steps()
    size = 0
    with Disk(transfers) as disk, unchecked(court.mallory):
        with court.mallory.stream("GET", f"{sandbox}/files/tree", params={"path": "d"}) as answer:
            assert answer.status_code == 200
            for number, piece in enumerate(answer.iter_raw(1 << 20)):
                size += len(piece)
                if number == 3:
                    assert round_trip(court) < PROMPT_S
    assert size > HUGE
    assert disk.most_bytes < SMALL
    assert used(transfers) == 0
    assert court.long_steps() == []


def test_a_sparse_tree_goes_in_at_no_cost(court: Court, transfers: Path) -> None:
    sandbox = court.sandbox(court.mallory)
    size = HUGE
    member = tarfile.TarInfo("huge")
    member.size = size
    court.long_steps()

    def archive() -> Iterator[bytes]:
        yield member.tobuf()
        for _ in range(size >> 20):
            yield bytes(1 << 20)
        yield bytes(1024)

    with Disk(transfers) as disk:
        answer = court.mallory.put(f"{sandbox}/files/tree", params={"path": "d"}, content=archive())
    assert answer.status_code == 204, answer.text
    assert disk.most_bytes < SMALL
    command = "stat -c %s d/huge; du -k d/huge | cut -f1; tr -d '\\0' < d/huge | wc -c"
    found = court.mallory.post(f"{sandbox}/exec", json={"command": command}).json()
    length, kilobytes, others = (int(word) for word in found["stdout"].split())
    assert (length, others) == (size, 0)
    assert kilobytes << 10 < size // 20
    assert used(transfers) == 0
    assert court.long_steps() == []


def test_what_never_fits_is_cut_early(court: Court, transfers: Path) -> None:
    """Data beyond the disk of the sandbox is not even gathered."""
    sandbox = court.sandbox(court.mallory, limits={"disk_bytes": 32 << 20})
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        member = tarfile.TarInfo("large")
        member.size = 48 << 20
        tar.addfile(member, io.BytesIO(b"x" * member.size))
    with Disk(transfers) as disk:
        answer = court.mallory.put(f"{sandbox}/files/tree", params={"path": "d"}, content=data.getvalue())
    assert answer.status_code == 507, answer.text
    assert disk.most_bytes < 100 << 20

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * (1 << 20)

    with Disk(transfers) as disk, unchecked(court.mallory):
        try:
            refused = court.mallory.put(f"{sandbox}/files/tree", params={"path": "d"}, content=endless()).status_code
        except OSError:
            refused = 507
    assert refused == 507
    assert disk.most_bytes < 100 << 20
    assert used(transfers) == 0


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000])
@pytest.mark.parametrize("kind", ["zeros", "data", "mixed"])
def test_what_is_written_is_what_is_read(tmp_path: Path, size: int, kind: str) -> None:
    block = {"zeros": b"\0", "data": b"x", "mixed": b"x" * 5000 + b"\0" * 9000 + b"y"}[kind]
    data = (block * (size // len(block) + 1))[:size]
    with open(tmp_path / "file", "wb", buffering=0) as file:
        for start in range(0, size, 10_000):
            sparse.write(file.fileno(), memoryview(data)[start : start + 10_000])
        sparse.end(file.fileno())
    assert (tmp_path / "file").read_bytes() == data
    if kind == "zeros":
        assert (tmp_path / "file").stat().st_blocks * 512 <= 4096
