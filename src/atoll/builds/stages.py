"""Carrying out stages: each once, when something needs it, those that do not depend on each other side by side."""

from __future__ import annotations

import asyncio
import time

from atoll import workers
from atoll.builds import copying, mounted, running
from atoll.builds.failures import in_step
from atoll.builds.renewals import Renewals
from atoll.builds.site import Site, start_of
from atoll.builds.steps import CopyFiles, MakeDirectory, RunCommand, StagePlan, Step
from atoll.cancellation import finish
from atoll.errors import BuildError
from atoll.sandbox.sandbox import AsyncSandbox

AT_ONCE = 3
"""How many steps of one build run at the same time."""


class Stages:
    """The stages of one build. `need` makes the files of a stage, unless they are in the cache."""

    def __init__(self, site: Site, renewals: Renewals) -> None:
        self._site = site
        self._renewals = renewals
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def need(self, stage: StagePlan) -> None:
        """Return when the files of this stage can be used. A stage that several others need is made once."""
        task = self._tasks.get(id(stage))
        if task is None:
            task = self._tasks[id(stage)] = asyncio.create_task(_StageRun(self._site, stage, self, self._turns).run())
        await asyncio.shield(task)
        if stage.renewal is not None:
            await workers.run(workers.ENGINE, self._renewals.keep, *stage.renewal)

    async def stop(self) -> None:
        """Cancel what still runs, and wait until its sandboxes are gone."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class _StageRun:
    def __init__(self, site: Site, stage: StagePlan, stages: Stages, turns: asyncio.Semaphore) -> None:
        self._site = site
        self._stage = stage
        self._stages = stages
        self._turns = turns
        self._sandbox: AsyncSandbox | None = None

    async def run(self) -> None:
        try:
            done = await self._known()
            if done == 0 and self._stage.parent is not None:
                await self._stages.need(self._stage.parent)
            for step in self._stage.steps[done:]:
                await asyncio.gather(*(self._stages.need(each) for each in step.stages()))
                async with self._turns:
                    await self._carry_out(step)
        finally:
            await finish(self._drop())

    async def _known(self) -> int:
        """Return how many steps need not be carried out. The last one that is in the cache stands for all before it."""
        steps = self._stage.steps
        for done in range(len(steps), 0, -1):
            if await self._site.building.has_step(steps[done - 1].key):
                # This also counts as a use of those before, so that they stay as long as what was made from them.
                await asyncio.gather(*(self._site.building.has_step(step.key) for step in steps[: done - 1]))
                for step in steps[:done]:
                    self._site.reporter.known(step)
                return done
        return 0

    async def _carry_out(self, step: Step) -> None:
        began = time.monotonic()
        self._site.reporter.step(step)
        with in_step(step):
            try:
                await self._do(step)
            except BuildError as error:
                await self._keep(error)
                raise
        self._site.reporter.done(step, began)

    async def _do(self, step: Step) -> None:
        match step.action:
            case RunCommand() if mounted.needs_volumes(step.action):
                await self._run_mounted(step, step.action)
                return
            case RunCommand():
                await running.run(self._site, await self._at(step), step, step.action)
            case CopyFiles():
                await copying.copy(self._site, await self._at(step), step, step.action)
            case MakeDirectory():
                await copying.make_directory(await self._at(step), step.action)
        await self._save(step)

    async def _at(self, step: Step) -> AsyncSandbox:
        """Return the sandbox of the stage in the state before this step."""
        if self._sandbox is None:
            self._sandbox = await self._site.new_sandbox(self._start(step))
            await self._site.check_image(self._sandbox, self._stage)
        return self._sandbox

    def _start(self, step: Step) -> str:
        return start_of(self._stage, self._stage.steps.index(step))

    async def _run_mounted(self, step: Step, action: RunCommand) -> None:
        """Run a command that mounts something, in a sandbox of its own."""
        await self._drop()
        image = self._start(step)
        async with mounted.mounted(self._site, action, image) as found:
            self._sandbox = await self._site.new_sandbox(image, found.volumes)
            await self._site.check_image(self._sandbox, self._stage)
            await found.prepare(self._sandbox)
            await running.run(self._site, self._sandbox, step, action)
            await self._save(step)
            if found.volumes:
                await self._drop()

    async def _save(self, step: Step) -> None:
        assert self._sandbox is not None
        await finish(self._site.building.save_step(self._sandbox.access.handle(), step.key))

    async def _keep(self, error: BuildError) -> None:
        """Let the sandbox of a failed step stay, if that was asked for."""
        if self._site.request.keep_failed and self._sandbox is not None and not error.sandbox_id:
            error.sandbox_id = self._sandbox.id
            await self._sandbox.detach()
            self._sandbox = None

    async def _drop(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await finish(sandbox.cleanup())
