"""Images, as they are shown, and requests about them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

from atoll.images import Image
from atoll.service.models.request_model import RequestModel
from atoll.service.models.sandbox_request import RegistryLogin

ImageName = Annotated[str, Field(min_length=1, max_length=1024)]


class ImageDefaults(BaseModel):
    """What an image says about sandboxes that are made from it."""

    env: dict[str, str] = {}
    """Environment variables."""
    entrypoint: list[str] = []
    """The program that its author meant to be run."""
    cmd: list[str] = []
    """Arguments for it, or the program itself."""
    work_dir: str = ""
    """The directory where commands start."""
    user: str = ""
    """The user who runs commands."""
    labels: dict[str, str] = {}
    """Labels of its author."""
    exposed_ports: list[str] = []
    """Ports on which its programs listen, such as `8000/tcp`."""
    volumes: list[str] = []
    """Paths that its author declared as volumes. They are only noted."""
    stop_signal: str = ""
    """The signal that ends its program."""
    shell: list[str] = []
    """What runs command lines of a Dockerfile. Empty: `/bin/sh -c`."""
    healthcheck: dict[str, Any] = {}
    """The health check, as in an OCI configuration."""


class ImageInfo(BaseModel):
    """An image that is on the server."""

    reference: str
    """Its name, with which sandboxes start from it."""
    digest: str
    """The digest of its files."""
    kind: str
    """Where it comes from: `oci`, `debian`, `recipe`, `tar` or `docker`."""
    size_bytes: int
    """The size of its files."""
    created_at: datetime
    """When it was stored here."""
    config: ImageDefaults
    """What it says about sandboxes that are made from it."""
    notes: list[str] = []
    """What was left out when it was unpacked, such as device nodes."""
    owner_id: str | None = None
    """The user whom it belongs to. Null: everybody."""

    @classmethod
    def of(cls, image: Image) -> ImageInfo:
        return cls(
            reference=image.reference,
            digest=image.digest,
            kind=image.kind.value,
            size_bytes=image.size_bytes,
            created_at=datetime.fromtimestamp(image.created_at, UTC),
            config=ImageDefaults.model_validate(asdict(image.config)),
            notes=list(image.notes),
            owner_id=getattr(image, "owner", "") or None,
        )


class ImagePage(BaseModel):
    """One page of images."""

    items: list[ImageInfo]
    """The images of this page, by name."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class ImagePullRequest(RequestModel):
    """The image to fetch from a registry."""

    of = "a pull"
    reference: ImageName
    """The name of the image."""
    registry_login: RegistryLogin | None = None
    """A login for an image that is not public. It is used for this request only and never stored."""
    shared: bool = False
    """Whether the image is for everybody. Only administrators may share one."""


class ImagePushRequest(RequestModel):
    """The image to send to a registry."""

    of = "a push"
    reference: ImageName
    """The name of the image."""
    target: ImageName | None = None
    """Its name in the registry. Default: the same."""
    registry_login: RegistryLogin | None = None
    """A login at the registry. It is used for this request only and never stored."""


class PushedImage(BaseModel):
    """An image that was sent to a registry."""

    reference: str
    """Its name in the registry."""
    digest: str
    """The digest of its manifest there."""


class ImagePruneRequest(RequestModel):
    """Which images to remove."""

    of = "a removal of images"
    unused_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Only images that have not been used for so many seconds."""


class PrunedImages(BaseModel):
    """What was removed."""

    references: list[str]
    """The names of the images."""
    freed_bytes: int
    """The space that was freed."""
