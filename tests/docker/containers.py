"""Sandboxes of the engine that is tested."""

from __future__ import annotations

from atoll import AsyncSandbox
from atoll.engines.docker.engine import DockerEngine
from atoll.model import Handle, SandboxSpec
from docker.private_engine import DEBIAN


def spec(image: str = DEBIAN, **more: object) -> SandboxSpec:
    return SandboxSpec.of(image=image, **more)


def new(engine: DockerEngine, image: str = DEBIAN, **more: object) -> AsyncSandbox:
    return AsyncSandbox(spec(image, **more), engine=engine)


async def handle_of(engine: DockerEngine, sandbox: AsyncSandbox) -> Handle:
    return next(handle for handle in await engine.list() if handle.sandbox_id == sandbox.id)
