"""What an account weighs, and what its group says about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.engines.host.cgroups.balance import Balance, weight_of
from atoll.engines.host.cgroups.hierarchy import Hierarchy


@pytest.mark.parametrize(
    ("used", "weight"), [(0.0, 100), (0.05, 100), (0.1, 100), (0.2, 50), (0.5, 20), (1.0, 10), (5.0, 6)]
)
def test_the_more_it_had_the_less_it_weighs(used: float, weight: int) -> None:
    assert weight_of(used, 100) == weight
    assert weight_of(used, 1) == 1, "never nothing"


class Machine:
    """Two processors, a clock, and groups of files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        hierarchy = Hierarchy("v1", {"cpu": folder, "cpuacct": folder})
        self.balance = Balance(hierarchy, 100, cpus=2, clock=lambda: self.now)
        self.used: dict[str, float] = {}

    def add(self, name: str) -> None:
        (self.folder / name).mkdir()
        (self.folder / name / "cpu.shares").write_text("1024")
        self.use(name, 0)

    def use(self, name: str, seconds: float) -> None:
        self.used[name] = self.used.get(name, 0.0) + seconds
        (self.folder / name / "cpuacct.usage").write_text(f"{int(self.used[name] * 1e9)}\n")

    def look(self) -> None:
        self.now += 0.5
        self.balance.look([f"/{name}" for name in self.used])

    def shares(self, name: str) -> int:
        return int((self.folder / name / "cpu.shares").read_text())


def test_two_who_compete_become_even_and_a_third_is_not_touched(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in ("a", "b", "light"):
        machine.add(name)
    machine.look()
    for _ in range(20):  # one processor second in each half: the kernel gives each what it weighs
        together = machine.shares("a") + machine.shares("b")
        machine.use("a", 0.95 * machine.shares("a") / together)
        machine.use("b", 0.95 * machine.shares("b") / together)
        machine.use("light", 0.05)
        machine.look()
    assert machine.shares("a") == machine.shares("b") < 1024 / 4
    assert machine.shares("light") == 1024
    for _ in range(20):
        machine.look()
    assert machine.shares("a") == 1024, "who rests weighs as before"


def test_a_weight_that_somebody_else_set_is_corrected(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("a")
    (tmp_path / "a" / "cpu.shares").write_text("64")  # by a server that was killed
    machine.look()
    machine.look()
    assert machine.shares("a") == 1024
    for _ in range(5):
        machine.use("a", 1.0)
        machine.look()
    light = machine.shares("a")
    (tmp_path / "a" / "cpu.shares").write_text("1024")  # with the ceilings of the account, which are made again
    machine.balance.forget("/a")
    machine.use("a", 1.0)
    machine.look()
    assert machine.shares("a") <= light


def test_a_group_that_was_made_anew_begins_anew(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("a")
    machine.look()
    for _ in range(3):
        machine.use("a", 1.0)
        machine.look()
    assert machine.shares("a") < 200
    (tmp_path / "a" / "cpu.shares").write_text("1024")  # as the kernel makes it
    machine.used["a"] = 0.0
    machine.use("a", 0.01)
    machine.look()
    machine.look()
    assert machine.shares("a") == 1024
    machine.used.clear()
    (tmp_path / "a" / "cpuacct.usage").unlink()
    machine.look()
    machine.balance.look(["/gone"])
