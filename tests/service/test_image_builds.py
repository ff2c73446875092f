"""The queue, the states and the logs of builds. They end when a test says so: what carries them out is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.builds import BuildEvent, BuildRequest, BuiltImage, OnBuildEvent
from atoll.errors import BuildError, ConflictError, ImageBuildNotFoundError, LimitReachedError
from atoll.images import Image, Kind
from atoll.server.services import Services, services
from atoll.server.settings import ServerSettings
from atoll.service import Caller, Scope
from atoll.service.image_builds import BuildRules, ImageBuildService
from atoll.service.models.image_build import ImageBuildRequest
from atoll.settings import Settings
from atoll.store import Quotas

ORDINARY = frozenset({Scope.READ, Scope.MANAGE})
ANN, BOB = Caller("ann", ORDINARY), Caller("bob", ORDINARY)
ADMIN = Caller("root", frozenset(Scope))
SECRET = "VGhlIHNlY3JldA=="


class Carrier:
    """Builds that go on until they are told to end."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}
        self.requests: dict[str, BuildRequest] = {}
        self.on_event: dict[str, OnBuildEvent] = {}
        self.changed = asyncio.Condition()

    def check(self) -> None:
        pass

    async def sweep(self) -> None:
        pass

    async def build(self, request: BuildRequest, on_event: OnBuildEvent) -> BuiltImage:
        name = request.name
        self.requests[name], self.on_event[name] = request, on_event
        end = self.running[name] = asyncio.Event()
        async with self.changed:
            self.changed.notify_all()
        try:
            await end.wait()
        finally:
            del self.running[name]
        if "fails" in name:
            raise BuildError("it failed", step=2, place="Dockerfile:3", exit_code=7, cause="exit", output="the end")
        return BuiltImage(Image(f"docker.io/library/{name}:latest", Kind.OCI, digest="sha256:00"), 3, 1, 0.1)

    async def until_running(self, *names: str) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: set(names) <= self.running.keys())


class Scene:
    def __init__(self, made: Services, folder: Path, rules: BuildRules) -> None:
        self.made, self.folder, self.rules = made, folder, rules
        self.carrier = Carrier()
        self.released: list[str] = []
        self.builds = self.service()

    def service(self) -> ImageBuildService:
        self.folder.mkdir(exist_ok=True)
        return ImageBuildService(
            self.folder,
            self.rules,
            self.carrier,
            manager=self.made.manager,
            specs=self.made.specs,
            snapshots=self.made.sandboxes.snapshots,
            reservations=self.made.sandboxes.reservations,
        )

    async def begin(self, caller: Caller, name: str, *, key: str | None = None, **options: Any) -> str:
        held = contextlib.AsyncExitStack()
        held.callback(self.released.append, name)
        wanted = ImageBuildRequest.model_validate({"name": name, **options})
        return (await self.builds.begin(caller, wanted, Path("/"), held, key=key)).id

    async def end(self, name: str, build_id: str) -> None:
        await self.carrier.until_running(name)
        self.carrier.running[name].set()
        await self.over(build_id)

    async def over(self, build_id: str) -> None:
        async for _ in self.builds.log(ADMIN, build_id, 0, follow=True):
            pass

    def state(self, build_id: str) -> str:
        return self.builds.get(ADMIN, build_id).state


Open = Callable[[BuildRules], contextlib.AbstractAsyncContextManager[Scene]]


@pytest.fixture
def scene(session_settings: Settings, tmp_path: Path) -> Open:
    @contextlib.asynccontextmanager
    async def opened(rules: BuildRules) -> AsyncIterator[Scene]:
        settings = ServerSettings.model_validate({"state_dir": tmp_path / "state", "engine": "process"})
        async with services(settings, session_settings) as made:
            scene = Scene(made, tmp_path / "builds", rules)
            await scene.builds.go_on()
            try:
                yield scene
            finally:
                await scene.builds.aclose()

    return opened


async def test_the_builds_of_one_user_do_not_delay_those_of_another(scene: Open) -> None:
    async with scene(BuildRules(at_once=3, at_once_of_one=2)) as s:
        hers = [await s.begin(ANN, f"ann{number}") for number in range(15)]
        await s.carrier.until_running("ann0", "ann1")
        his = await s.begin(BOB, "bob")
        await s.carrier.until_running("bob")
        assert set(s.carrier.running) == {"ann0", "ann1", "bob"}
        more = await s.begin(BOB, "bob2")
        await s.end("bob", his)
        await s.carrier.until_running("bob2")
        assert [s.state(each) for each in hers[:3]] == ["running", "running", "queued"]
        await s.end("ann0", hers[0])
        await s.carrier.until_running("ann2", "bob2")
        assert s.state(more) == "running"


async def test_a_user_has_only_so_many_builds(scene: Open) -> None:
    async with scene(BuildRules(at_once=1, waiting_of_one=3)) as s:
        first = [await s.begin(ANN, f"a{number}") for number in range(3)]
        with pytest.raises(LimitReachedError):
            await s.begin(ANN, "a3")
        assert s.released == ["a3"]
        await s.begin(BOB, "b")
        await s.builds.cancel(ANN, first[2])
        await s.begin(ANN, "a4")
        with pytest.raises(LimitReachedError):
            await s.begin(Caller("carl", ORDINARY, Quotas(max_builds=0)), "c")


async def test_a_quota_of_builds_at_once(scene: Open) -> None:
    async with scene(BuildRules(at_once=4, at_once_of_one=4)) as s:
        carl = Caller("carl", ORDINARY, Quotas(max_builds=1))
        ids = [await s.begin(carl, f"c{number}") for number in range(2)]
        await s.carrier.until_running("c0")
        await s.begin(BOB, "b")
        await s.carrier.until_running("b")
        assert s.state(ids[1]) == "queued"
        await s.end("c0", ids[0])
        await s.carrier.until_running("c1")


async def test_a_build_is_cancelled_wherever_it_is(scene: Open) -> None:
    async with scene(BuildRules(at_once=1)) as s:
        running, waiting = await s.begin(ANN, "one"), await s.begin(ANN, "two")
        await s.carrier.until_running("one")
        with pytest.raises(ImageBuildNotFoundError):
            await s.builds.cancel(BOB, running)
        for build in (waiting, running, running):
            await s.builds.cancel(ANN, build)
        assert (s.state(running), s.state(waiting)) == ("cancelled", "cancelled")
        assert sorted(s.released) == ["one", "two"]
        assert s.carrier.running == {}
        done = await s.begin(ANN, "three")
        await s.end("three", done)
        await s.builds.cancel(ANN, done)
        assert s.state(done) == "done"


async def test_what_a_failure_says(scene: Open) -> None:
    async with scene(BuildRules()) as s:
        build = await s.begin(ANN, "fails")
        await s.end("fails", build)
        error = s.builds.get(ANN, build).error
        assert error is not None
        found = (error.code, error.step, error.place, error.exit_code, error.cause, error.output)
        assert found == ("build_failed", 2, "Dockerfile:3", 7, "exit", "the end")


async def test_a_restart_ends_what_was_going_on_and_keeps_what_is_known(scene: Open) -> None:
    async with scene(BuildRules(at_once=1)) as s:
        options: dict[str, Any] = {"args": {"TOKEN": "tok-123456"}, "secrets": {"key": SECRET}}
        done = await s.begin(ANN, "done", **options)
        await s.end("done", done)
        going, waiting = await s.begin(ANN, "going", **options), await s.begin(ANN, "waiting")
        await s.carrier.until_running("going")
        s.carrier.on_event["going"](BuildEvent("step", "RUN x", "build", 2, 5))
        old, log = s.builds, next((s.folder / going).glob("log"))
        with log.open("ab") as file:
            file.write(b'{"type": "output", "te')  # the server was killed in the middle of a line
        s.builds = s.service()
        await s.builds.go_on()
        try:
            assert [s.state(each) for each in (done, going, waiting)] == ["done", "failed", "failed"]
            info = s.builds.get(ANN, going)
            assert info.error is not None
            assert (info.error.detail, info.step, info.steps, info.stage) == ("the server was restarted", 2, 5, "build")
            assert (info.args, info.secrets) == (["TOKEN"], ["key"])
            events = [event async for event in s.builds.log(ANN, going, 0, follow=True)]
            assert [event["type"] for event in events] == ["step", "end"]
        finally:
            await s.builds.aclose()
            s.builds = old
        kept = b"".join(path.read_bytes() for path in s.folder.rglob("*") if path.is_file())
        assert b"TOKEN" in kept
        assert not any(secret in kept for secret in (b"tok-123456", SECRET.encode(), b"The secret"))


async def test_a_stopping_server_ends_its_builds(scene: Open) -> None:
    async with scene(BuildRules()) as s:
        build = await s.begin(ANN, "one")
        await s.carrier.until_running("one")
        await s.builds.aclose()
        assert s.state(build) == "failed"
        assert s.released == ["one"]


async def test_a_log_is_read_on_from_any_offset(scene: Open) -> None:
    async with scene(BuildRules()) as s:
        build = await s.begin(ANN, "one")
        await s.carrier.until_running("one")
        for number in range(3000):
            s.carrier.on_event["one"](BuildEvent("output", f"{number}\n", step=1))
        whole = await read(s, build, 0)
        assert [event["text"] for event in whole] == [f"{number}\n" for number in range(3000)]
        for number in (0, 1, 1234, 2998):
            rest = await read(s, build, whole[number]["offset"])
            assert [event["text"] for event in rest] == [event["text"] for event in whole[number + 1 :]]
        middle = await read(s, build, whole[10]["offset"] - 1)  # within a line
        assert middle[0] == whole[11]
        following = asyncio.create_task(s.over(build))
        await s.end("one", build)
        await following
        assert [event["state"] for event in (await read(s, build, whole[-1]["offset"]))] == ["done"]
        assert [event["type"] for event in await read(s, build, 1 << 50)] == ["end"]


async def read(s: Scene, build: str, offset: int) -> list[Mapping[str, Any]]:
    return [event async for event in s.builds.log(ANN, build, offset, follow=False)]


async def test_a_log_is_bounded_and_says_so(scene: Open) -> None:
    async with scene(BuildRules(log_bytes=100_000)) as s:
        build = await s.begin(ANN, "one")
        await s.carrier.until_running("one")
        s.carrier.on_event["one"](BuildEvent("output", "\x00" * 50_000))
        for _ in range(200):
            s.carrier.on_event["one"](BuildEvent("output", "x" * 10_000))
        s.carrier.on_event["one"](BuildEvent("step", "RUN y", step=2))
        await s.end("one", build)
        events = await read(s, build, 0)
        assert [event["type"] for event in events].count("dropped") == 1
        assert [event["type"] for event in events][-2:] == ["step", "end"]
        assert (s.folder / build / "log").stat().st_size < 110_000


async def test_only_the_latest_builds_are_kept(scene: Open) -> None:
    async with scene(BuildRules(kept_of_one=2)) as s:
        ids = []
        for number in range(4):
            ids.append(await s.begin(ANN, f"a{number}"))
            await s.end(f"a{number}", ids[-1])
        await s.builds.aclose()
        assert {info.id for info in s.builds.list(ANN)} == set(ids[2:])
        assert {path.name for path in s.folder.iterdir()} == set(ids[2:])
        with pytest.raises(ImageBuildNotFoundError):
            s.builds.get(ANN, ids[0])


async def test_a_repeated_request_is_the_same_build(scene: Open) -> None:
    async with scene(BuildRules()) as s:
        first = await s.begin(ANN, "one", key="k")
        assert await s.begin(ANN, "one", key="k") == first
        assert await s.begin(BOB, "one", key="k") != first
        with pytest.raises(ConflictError):
            await s.begin(ANN, "other", key="k")
        assert s.released == ["one", "other"]


async def test_users_see_their_own_builds(scene: Open) -> None:
    async with scene(BuildRules()) as s:
        hers, his = await s.begin(ANN, "one"), await s.begin(BOB, "two")
        assert [info.id for info in s.builds.list(ANN)] == [hers]
        assert {info.id for info in s.builds.list(ADMIN)} == {hers, his}
        with pytest.raises(ImageBuildNotFoundError):
            s.builds.get(ANN, his)
        await s.carrier.until_running("one", "two")
        request = s.carrier.requests["one"]
        assert (request.owner, bool(request.account), request.network) == ("ann", True, "none")
        assert request.account != s.carrier.requests["two"].account
