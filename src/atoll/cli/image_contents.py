"""What `atoll image inspect` shows of the content of an image: versions, and a bill of materials."""

from __future__ import annotations

from typing import Any

from atoll import workers
from atoll.errors import SpecError
from atoll.images import Image, Images
from atoll.images.contents import KINDS, Contents, read_contents


async def contents_of(images: Images, image: Image) -> Contents:
    """Return what is installed in a stored image."""
    if not image.layers:
        raise SpecError("'host' is this machine itself, not a stored image")

    def read() -> Contents:
        with images.view(image.reference) as root:
            return read_contents(root)

    return await workers.run(workers.IMAGE, read)


def versions(contents: Contents) -> dict[str, dict[str, str]]:
    """Return the packages by kind and name, with their versions."""
    return {kind: {package.name: package.version for package in contents.of(kind)} for kind in KINDS}


async def bill_of_materials(images: Images, image: Image, form: str) -> dict[str, Any]:
    """Return the bill of materials of a stored image, as `spdx` or `cyclonedx`. Raises SpecError."""
    from atoll.images.sbom import sbom

    return sbom(image, await contents_of(images, image), form)
