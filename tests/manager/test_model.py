"""Sixteen clients at once on sixty-four names, compared with a model after every round."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from atoll.errors import ConflictError, LimitReachedError, SandboxError, SandboxGoneError, SandboxNotFoundError
from atoll.manager import PoolSettings, SandboxManager
from atoll.model import Handle, SandboxSpec
from atoll.settings import Settings
from leftovers import leftovers
from manager.engines import TROUBLED, TroubledEngine

CLIENTS, NAMES, CAP = 16, 64, 12
Order = tuple[str, int, int]
"""What to do, with which name, and after how many turns of the event loop a caller gives up."""
ORDERS = strategies.tuples(
    strategies.sampled_from(["create", "create", "get_or_create", "delete", "use", "cancel"]),
    strategies.integers(0, NAMES - 1),
    strategies.integers(0, 40),
)


@dataclass
class Round:
    """What the clients of one round were told."""

    made: list[tuple[int, str]] = field(default_factory=list)
    got: list[tuple[int, str]] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)
    refused: Counter[type[SandboxError]] = field(default_factory=Counter)


class Watched:
    """Counts what an engine has at any moment, from the first step of making it to the last of removing it."""

    def __init__(self, engine: TroubledEngine) -> None:
        self.there: set[str] = set()
        self.most = 0
        self.engine = engine
        create, delete = engine.create, engine.delete

        async def counted_create(sandbox_id: str, spec: SandboxSpec) -> Handle:
            assert sandbox_id not in self.there
            self.there.add(sandbox_id)
            self.most = max(self.most, len(self.there))
            try:
                return await create(sandbox_id, spec)
            except BaseException:
                self.there.discard(sandbox_id)
                raise

        async def counted_delete(handle: Handle) -> None:
            await delete(handle)
            self.there.discard(handle.sandbox_id)

        engine.create, engine.delete = counted_create, counted_delete  # type: ignore[method-assign]


class Clients(RuleBasedStateMachine):
    engine_name: str
    settings_: Settings
    pooled = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="atoll-", dir="/tmp"))
        self.live: dict[int, str] = {}
        self.ever: set[str] = set()
        self.runner.run(self._start())

    async def _start(self) -> None:
        self.watched = Watched(TROUBLED[self.engine_name](self.settings_))
        pools = [PoolSettings(SandboxSpec(), size=2)] if self.pooled else []
        self.manager = SandboxManager(
            CAP, engine=self.watched.engine, settings=self.settings_, state_dir=self.folder / "state", pools=pools
        )
        await self.manager.start()

    def teardown(self) -> None:
        async def end() -> None:
            report = await self.manager.cleanup()
            await self.watched.engine.aclose()
            assert report.failed == {}

        self.runner.run(end())
        self.runner.close()
        shutil.rmtree(self.folder)
        assert leftovers(self.settings_) == []

    @rule(orders=strategies.lists(ORDERS, min_size=CLIENTS, max_size=CLIENTS))
    def everybody_at_once(self, orders: list[Order]) -> None:
        before, told = dict(self.live), Round()

        async def all_of_them() -> None:
            await asyncio.gather(*(self._obey(order, told) for order in orders))

        self.runner.run(all_of_them())
        self._compare(before, orders, told)

    @rule(keep=strategies.just(True))
    def the_manager_is_replaced(self, keep: bool) -> None:
        async def replace() -> None:
            await self.manager.cleanup(keep=keep)
            await self.watched.engine.aclose()
            for id in self.watched.there - set(self.live.values()):
                raise AssertionError(f"{id} is nobody's and was not removed")
            await self._start()
            self.watched.there = set(self.live.values())

        self.runner.run(replace())

    @invariant()
    def nothing_is_double_lost_or_too_many(self) -> None:
        async def look() -> tuple[dict[int, str], set[str]]:
            records = await self.manager.list_sandboxes()
            named = [int(record.name) for record in records if record.name is not None]
            assert len(named) == len(set(named)) == len(records), "a name stands for two, or one has none"
            there = {handle.sandbox_id for handle in await self.watched.engine.list()}
            return {int(record.name or -1): record.id for record in records}, there

        known, there = self.runner.run(look())
        assert known == self.live
        if not self.pooled:
            assert set(known.values()) == there, "the engine has something else than the manager"
        assert self.watched.most <= CAP, "the cap was exceeded"

    async def _obey(self, order: Order, told: Round) -> None:
        verb, name, turns = order
        try:
            match verb:
                case "create":
                    told.made.append((name, await self.manager.create_sandbox(name=str(name))))
                case "get_or_create":
                    told.got.append((name, await self.manager.get_or_create(str(name))))
                case "delete" if name in self.live:
                    id = self.live[name]
                    if await self.manager.delete_sandbox(id):
                        told.deleted.add(id)
                case "use" if name in self.live:
                    sandbox = await self.manager.get_sandbox(self.live[name])
                    await sandbox.append_file("mine", f"{sandbox.id}\n")
                    assert set((await sandbox.read_file("mine")).split()) == {sandbox.id}, "two users share one"
                case "cancel":
                    await self._give_up(str(name), turns, told)
        except (ConflictError, LimitReachedError, SandboxNotFoundError, SandboxGoneError) as error:
            told.refused[type(error)] += 1

    async def _give_up(self, name: str, turns: int, told: Round) -> None:
        task = asyncio.ensure_future(self.manager.create_sandbox(name=name))
        for turn in range(turns):
            await asyncio.sleep(0 if turn < 12 else 0.001)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            told.made.append((int(name), task.result()))

    def _compare(self, before: dict[int, str], orders: list[Order], told: Round) -> None:
        asked = Counter(name for verb, name, _ in orders if verb in ("create", "get_or_create", "cancel"))
        new = {id for _, id in told.made}
        assert len(new) == len(told.made), "an id was given to two"
        assert not new & self.ever, "an id came again"
        for name, _ in told.made:
            assert name not in before or before[name] in told.deleted, "a name was given away twice"
        for name, id in told.got:
            if id != before.get(name):
                new.add(id)
        after = {name: id for name, id in before.items() if id not in told.deleted}
        for name, id in (*told.made, *told.got):
            if id not in told.deleted:
                assert after.setdefault(name, id) == id, "two of one name"
        if told.refused[LimitReachedError]:
            assert len(before) + sum(asked.values()) > CAP, "refused though there was room"
        self.ever |= new
        self.live = after


def run(engine_name: str, installation: Settings, *, rounds: int, runs: int, pooled: bool) -> None:
    machine = type("Machine", (Clients,), {"engine_name": engine_name, "settings_": installation, "pooled": pooled})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=rounds,
            deadline=None,
            database=None,
            # What happens between processes cannot be replayed, so a smaller example would be another one.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("pooled", [False, True])
def test_many_clients_at_once_agree_with_a_model(engine_name: str, settings: Settings, pooled: bool) -> None:
    run(engine_name, settings, rounds=10, runs=2, pooled=pooled)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pooled", [False, True])
def test_a_thousand_operations_at_a_time_agree_with_a_model(engine_name: str, settings: Settings, pooled: bool) -> None:
    run(engine_name, settings, rounds=64, runs=5, pooled=pooled)
