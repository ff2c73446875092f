"""The maker of the ready-made environments, which is in a layer above this one and is imported by name when needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from atoll.archive.work import ProgressCallback
from atoll.images.image import Image

if TYPE_CHECKING:
    from atoll.images.images import Images

_MODULE = "atoll.builds.environments.making"


class EnvironmentMaker(Protocol):
    def digest(self, name: str) -> str:
        """Return the version of an environment. It changes when another image would be made."""

    async def make(self, images: Images, name: str, progress: ProgressCallback | None, *, refresh: bool) -> Image:
        """Make the image of an environment. The caller makes sure that nobody else makes the same one."""


def maker() -> EnvironmentMaker:
    return cast(EnvironmentMaker, importlib.import_module(_MODULE))
