"""Takes an image over from the local Docker engine, by `docker save`."""

from __future__ import annotations

import os

from atoll.archive.archive_limits import ImageLimits
from atoll.archive.extract import Extraction
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError
from atoll.images.archive_program import Program, running
from atoll.images.image_store import Draft
from atoll.images.oci_documents import ImageConfig
from atoll.images.reference import DEFAULT_REGISTRY, Kind, Reference
from atoll.images.tar_import import import_stream

_HINT = "Install Docker's command line tool, or pull the image from its registry."


def docker_name(reference: Reference) -> str:
    """As Docker lists it: without the default registry."""
    name = str(reference).removeprefix(f"{Kind.DOCKER}:")
    return name.removeprefix(f"{DEFAULT_REGISTRY}/").removeprefix("library/")


def import_from_docker(
    reference: Reference, draft: Draft, limits: ImageLimits, work: Work
) -> tuple[ImageConfig, Extraction]:
    """Fill the draft. Raises ImageNotFoundError if Docker has no such image, ImageError if there is no Docker."""
    name = docker_name(reference)
    work.report("pull", f"asking the Docker engine for {name}")
    with running(["docker", "image", "save", name], dict(os.environ), work, lambda _: None, _HINT) as program:
        try:
            result = import_stream(program, draft, limits, work)
        except ImageError as error:
            work.check()
            if program.status():
                raise _failed(name, program) from error
            raise
        if program.status():
            raise _failed(name, program)
    return result


def _failed(name: str, program: Program) -> ImageError:
    reason = " ".join(program.lines)[-500:]
    if "reference does not exist" in reason or "No such image" in reason or "not found" in reason:
        return ImageNotFoundError(f"the Docker engine has no image {name!r}", hint="`docker images` lists what it has.")
    return ImageError(f"the Docker engine did not give us {name!r}: {reason}", hint="Check that it runs: docker info")
