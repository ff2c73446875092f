"""Ports of a sandbox that a server makes available: as they are requested, checked and shown."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ExposedPort(BaseModel):
    """A port inside a sandbox that the server makes available under a URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")]
    """Identifies the port and, with `-` replaced by `_`, names the variable that holds its number inside."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """The port number inside the sandbox."""
    public: bool = False
    """Whether anybody who knows the URL can reach the port without a credential."""


class HealthCheck(BaseModel):
    """An HTTP check of a new sandbox. The sandbox is STARTING until a GET request is answered with a 2xx status, and in
    ERROR if that takes longer than the grace period."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: Annotated[str, Field(pattern=r"^/[\x21-\x7e]{0,399}$")] = "/health"
    """The path to request."""
    port: Annotated[str, Field(max_length=63)] | Annotated[int, Field(ge=1, le=65535)] = "AGENT_SERVER"
    """The name of one of the sandbox's exposed ports, or a port number."""
    grace_s: Annotated[float, Field(gt=0, le=3600)] = 15.0
    """How many seconds the check may fail before the sandbox counts as failed."""


class ExposedUrl(BaseModel):
    """Where an exposed port of a sandbox can be reached."""

    name: str
    """The name of the exposed port."""
    url: str
    """The URL by path. Browsers give pages served under it no origin."""
    port: int
    """The port number inside the sandbox."""
    host_url: str | None = None
    """The URL by host name: an origin of its own, with cookies and storage. Null where no such host name leads to this
    server."""
    public: bool = False
    """Whether the port can be reached without a credential."""
