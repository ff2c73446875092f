"""The bench of the conformance suite for one runtime of the `oci` engine."""

from __future__ import annotations

import json
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.conformance import Bench
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes.oci_runtimes import isolation_of
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

RUNTIMES = ("runc", "crun", "runsc")
EACH_RUNTIME = ("runc", pytest.param("crun", marks=pytest.mark.again), "runsc")
_AS_THIS_BENCH = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from oci.benches import RuntimeBench as Bench
"""


@dataclass
class RuntimeBench(Bench):
    runtime: str = "runc"

    @classmethod
    def of(cls, settings: Settings, runtime: str, image: str = "host") -> RuntimeBench:
        return cls(OciEngine(settings, runtime), settings, image, runtime=runtime)

    def unmade(self, **spec: Any) -> AsyncSandbox:
        return super().unmade(**{"isolation": isolation_of(self.runtime), **spec})

    @asynccontextmanager
    async def other_process(self, source: str, *arguments: str) -> AsyncIterator[Process]:
        async with super().other_process(_AS_THIS_BENCH + source, *arguments) as process:
            yield process

    @classmethod
    def told(cls, text: str) -> RuntimeBench:
        told = json.loads(text)
        return cls.of(Settings(Path(told["data_dir"]), Path(told["run_dir"])), told["runtime"], told["image"])

    def _tell(self) -> str:
        return json.dumps({**json.loads(super()._tell()), "runtime": self.runtime})
