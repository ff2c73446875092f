"""Random writes, checkpoints, rollbacks, forks and deletes, compared with a model that is plain dictionaries."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from checkpoints.conftest import MakeSandbox, emptied, engine_named

Files = dict[str, str]
MOST_SANDBOXES = 4
NAMES = [f"{folder}{name}" for folder in ("", "d/", "d/e/") for name in "abc"]


@dataclass
class Branch:
    """What one sandbox should look like."""

    sandbox: AsyncSandbox
    files: Files = field(default_factory=dict)
    saved: dict[str, Files] = field(default_factory=dict)
    began: Files = field(default_factory=dict)


class Walk:
    def __init__(self, dice: random.Random, first: AsyncSandbox) -> None:
        self.dice = dice
        self.branches = [Branch(first)]

    async def step(self) -> str:
        branch = self.dice.choice(self.branches)
        what = self.dice.choices(
            ["write", "remove", "checkpoint", "rollback", "fork", "drop", "forget", "restart", "check"],
            [40, 12, 14, 10, 4, 3, 4, 1, 12],
        )[0]
        await getattr(self, what)(branch)
        return f"{what} {branch.sandbox.id}"

    async def write(self, branch: Branch) -> None:
        name = self.dice.choice(NAMES)
        content = self.dice.randbytes(self.dice.choice([0, 10, 5000, 200_000])).hex()
        await branch.sandbox.write_file(name, content)
        branch.files[name] = hashlib.sha256(content.encode()).hexdigest()

    async def remove(self, branch: Branch) -> None:
        name = self.dice.choice([*NAMES, "d", "d/e"])
        await branch.sandbox.remove(name, missing_ok=True)
        for gone in [each for each in branch.files if each == name or each.startswith(f"{name}/")]:
            del branch.files[gone]

    async def checkpoint(self, branch: Branch) -> None:
        made = await branch.sandbox.checkpoint()
        branch.saved[made.id] = dict(branch.files)

    async def rollback(self, branch: Branch) -> None:
        if branch.saved:
            target = self.dice.choice(sorted(branch.saved))
            await branch.sandbox.rollback(target)
            branch.files = dict(branch.saved[target])
            await self.check(branch)

    async def restart(self, branch: Branch) -> None:
        await branch.sandbox.restart()
        branch.files = dict(branch.began)
        await self.check(branch)

    async def fork(self, branch: Branch) -> None:
        if len(self.branches) >= MOST_SANDBOXES:
            return
        source = self.dice.choice([None, *sorted(branch.saved)])
        files = branch.files if source is None else branch.saved[source]
        (twin,) = await branch.sandbox.fork(1, source)
        self.branches.append(Branch(twin, dict(files), {}, dict(files)))
        await self.check(self.branches[-1])

    async def drop(self, branch: Branch) -> None:
        if len(self.branches) > 1:
            self.branches.remove(branch)
            await branch.sandbox.cleanup()

    async def forget(self, branch: Branch) -> None:
        if branch.saved:
            target = self.dice.choice(sorted(branch.saved))
            await branch.sandbox.delete_checkpoint(target)
            del branch.saved[target]

    async def check(self, branch: Branch) -> None:
        seen = await branch.sandbox.exec("find . -type f -exec sha256sum {} +", timeout=60)
        found = {line[66:].removeprefix("./"): line[:64] for line in seen.stdout.splitlines()}
        assert found == branch.files
        assert {each.id for each in await branch.sandbox.checkpoints()} == set(branch.saved)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("native", 150, marks=pytest.mark.timeout(180)),
        pytest.param("runsc", 40, marks=pytest.mark.timeout(180)),
        pytest.param("native", 500, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param("runsc", 500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_every_state_is_what_the_model_says(
    name: str, steps: int, settings: Settings, sandbox_on: MakeSandbox
) -> None:
    engine: LinuxEngine = engine_named(name, settings)
    seed = random.randrange(1 << 32)
    walk = Walk(random.Random(seed), await sandbox_on(engine).create())
    try:
        for number in range(steps):
            try:
                await walk.step()
            except BaseException as error:
                error.add_note(f"at step {number} of seed {seed}")
                raise
        for branch in walk.branches:
            await walk.check(branch)
    finally:
        for branch in walk.branches:
            await branch.sandbox.cleanup()
        await emptied(engine)
