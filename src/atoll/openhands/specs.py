"""The catalogue of specs, as OpenHands's services take it: read only."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from atoll.errors import SandboxError
from atoll.openhands.models import SandboxSpecInfo, SandboxSpecInfoPage


class SandboxSpecService(ABC):
    @abstractmethod
    async def search_sandbox_specs(self, page_id: str | None = None, limit: int = 100) -> SandboxSpecInfoPage:
        """`page_id` is where the page before ended."""

    @abstractmethod
    async def get_sandbox_spec(self, sandbox_spec_id: str) -> SandboxSpecInfo | None: ...

    async def get_default_sandbox_spec(self) -> SandboxSpecInfo:
        """The first. Raises SandboxError if there is none."""
        page = await self.search_sandbox_specs(limit=1)
        if not page.items:
            raise SandboxError("No sandbox specs available!")
        return page.items[0]

    async def batch_get_sandbox_specs(self, sandbox_spec_ids: list[str]) -> list[SandboxSpecInfo | None]:
        """In the order asked for; None for what is not there."""
        return await asyncio.gather(*(self.get_sandbox_spec(spec_id) for spec_id in sandbox_spec_ids))


class PresetSandboxSpecService(SandboxSpecService):
    """Specs that are known from the start."""

    def __init__(self, specs: Sequence[SandboxSpecInfo]) -> None:
        self.specs = list(specs)

    async def search_sandbox_specs(self, page_id: str | None = None, limit: int = 100) -> SandboxSpecInfoPage:
        first = offset(page_id)
        more = str(first + limit) if len(self.specs) > first + limit else None
        return SandboxSpecInfoPage(items=self.specs[first : first + limit], next_page_id=more)

    async def get_sandbox_spec(self, sandbox_spec_id: str) -> SandboxSpecInfo | None:
        return next((spec for spec in self.specs if spec.id == sandbox_spec_id), None)


def offset(page_id: str | None) -> int:
    """As upstream has it: what is no number means the beginning."""
    return int(page_id) if page_id is not None and page_id.isdecimal() and len(page_id) < 16 else 0
