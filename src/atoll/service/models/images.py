"""Images as a server shows them, and requests about them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from atoll.service.models.catalogue import ImageProgressInfo
from atoll.service.models.request_model import RequestModel
from atoll.service.models.sandbox_request import RegistryLogin

ImageName = Annotated[str, Field(min_length=1, max_length=1024)]


class ImageInfo(BaseModel):
    """An image of the server."""

    name: str
    """The full name of the image. Sandboxes are made from it by this name or a shorter one that means the same."""
    owner_id: str | None
    """The user whom the image belongs to. Null: it belongs to everybody."""
    status: Literal["ready", "pulling", "failed"] = "ready"
    """Whether the image is on the server."""
    detail: str = ""
    """Why pulling the image failed."""
    progress: ImageProgressInfo | None = None
    """How far the image is, while it is being pulled."""
    digest: str | None = None
    """The digest of the files. Equal images have the same digest. Null: the image is not on the server."""
    created_at: datetime | None = None
    """When the image was made on this server."""
    size_bytes: int = 0
    """The size of all layers."""
    own_bytes: int = 0
    """The size of the layers that no other image has: about what deleting it frees."""
    shared_bytes: int = 0
    """The size of the layers that other images have, too."""
    private: bool = False
    """Whether it was pulled with a login. Then the registry is asked each time whether a user may have it."""
    users: list[str] = []
    """The caller's sandboxes that use it."""


class ImageDetails(ImageInfo):
    """An image with its configuration."""

    env: dict[str, str] = {}
    """Environment variables of its sandboxes."""
    entrypoint: list[str] = []
    """The program that its command is given to. It is only shown."""
    command: list[str] = []
    """Its default command. It is only shown."""
    work_dir: str = ""
    """The directory where commands start."""
    user: str = ""
    """The user that commands run as."""
    labels: dict[str, str] = {}
    """Labels that the author of the image gave it."""
    exposed_ports: list[str] = []
    """The ports that it names, such as `8000/tcp`."""
    history: list[str] = []
    """The instructions that made it, oldest first."""
    layers: list[ImageLayerInfo] = []
    """The layers that it consists of, lowest first."""
    notes: list[str] = []
    """What was left out when it was unpacked, such as device nodes."""


class ImageLayerInfo(BaseModel):
    """One layer of an image."""

    digest: str
    """The digest of this layer and all those below it."""
    size_bytes: int
    """The size of this layer alone."""


class ImagePage(BaseModel):
    """One page of images."""

    items: list[ImageInfo]
    """The images of this page, sorted by name."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class StoredImagePullRequest(RequestModel):
    """The image to pull."""

    of = "a pull"
    name: ImageName
    """The image, as `[REGISTRY/]NAME[:TAG]`."""
    registry_login: RegistryLogin | None = None
    """A login for an image that is not public. It is not stored."""


class ImagePruneRequest(RequestModel):
    """What to remove."""

    of = "a request to prune"
    all: bool = False
    """Whether images that have a name and that no sandbox uses are removed as well."""
    older_days: Annotated[float, Field(ge=0, le=36_500)] = 0
    """Remove only what is at least that many days old."""


class ImagesPruned(BaseModel):
    """What was removed."""

    names: list[str]
    """The images."""
    freed_bytes: int
    """How much space is free again."""


class ImageSharingRequest(RequestModel):
    """Whom an image shall belong to."""

    of = "a change of an image's owner"
    name: ImageName
    """The image."""
    owner: Annotated[str, Field(max_length=256)] | None = None
    """The user whom the image belongs to while it is not shared. Default: the caller."""
    shared: bool
    """Whether the image is everybody's."""


ImageDetails.model_rebuild()
