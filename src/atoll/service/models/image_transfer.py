"""Requests to send an image to a registry, and the answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from atoll.service.models.request_model import RequestModel
from atoll.service.models.sandbox_request import RegistryLogin

ImageName = Annotated[str, Field(min_length=1, max_length=1024)]


class ImagePushRequest(RequestModel):
    """The image to send to a registry."""

    of = "a push"
    name: ImageName
    """The name of the image here."""
    target: ImageName | None = None
    """Its name in the registry. Default: the same."""
    registry_login: RegistryLogin | None = None
    """A login at the registry. It is used for this request only and never stored."""


class PushedImage(BaseModel):
    """An image that was sent to a registry."""

    name: str
    """Its name in the registry."""
    digest: str
    """The digest of its manifest there."""
    sent_bytes: int
    """The size of what the registry did not have yet."""
