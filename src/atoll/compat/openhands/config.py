"""OpenHands's settings of its sandboxes. Each has its effect, or is refused with a reason if it asks for more."""

from __future__ import annotations

import json
import os
import platform as machine
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from atoll.compat.openhands.values import VolumeMount

_IMAGE = "nikolaik/python-nodejs:python3.12-nodejs22"
_PREFIX = "SANDBOX_"
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}

REFUSED: dict[str, tuple[object, str]] = {
    "enable_auto_lint": (False, "Atoll does not edit files by itself; run the linter in the sandbox"),
    "use_host_network": (False, "a sandbox on the host's network is not isolated; expose the ports that it needs"),
    "additional_networks": ([], "a network policy, and not Docker's networks, decides what a sandbox may reach"),
    "runtime_extra_build_args": (
        None,
        "Atoll does not build images for sandboxes; build the image yourself, and name it",
    ),
    "force_rebuild_runtime": (False, "no image is built for a sandbox: its files are those of the image itself"),
    "browsergym_eval_env": (None, "there is no BrowserGym here; run it in the sandbox"),
    "enable_gpu": (False, "no engine can share a GPU between isolated sandboxes"),
    "cuda_visible_devices": (None, "no engine can share a GPU between isolated sandboxes"),
    "docker_runtime_kwargs": (None, "options of Docker could undo the isolation"),
    "selected_repo": (None, "clone it in the sandbox, with the credentials that you give it"),
    "trusted_dirs": ([], "no directory of this machine is used but those in `volumes`"),
    "remote_runtime_enable_retries": (True, "requests that may be repeated always are; this cannot be turned off"),
}
"""The only accepted value of each of these settings, and the reason."""


class SandboxConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    remote_runtime_api_url: str | None = "http://localhost:8000"
    local_runtime_url: str = "http://localhost"
    """The first part of exposed URLs."""
    keep_runtime_alive: bool = False
    """Whether sandboxes outlive the service."""
    pause_closed_runtimes: bool = True
    """Whether sandboxes that outlive the service are paused meanwhile."""
    rm_all_containers: bool = False
    """Whether all of the user's sandboxes are deleted when the service ends, whatever the other settings."""
    api_key: str | None = None
    base_container_image: str | None = _IMAGE
    runtime_container_image: str | None = None
    """The image of the default spec; by default the base image."""
    user_id: int = Field(default_factory=os.getuid, ge=0)
    """The user id for commands, where the engine has more than one user."""
    timeout: int = Field(default=120, gt=0)
    """The default timeout of a command in seconds."""
    remote_runtime_init_timeout: int = Field(default=180, gt=0)
    remote_runtime_api_timeout: int = Field(default=180, gt=0)
    """Timeouts in seconds. The start of a remote sandbox may take as long as the shorter of the two."""
    remote_runtime_enable_retries: bool = True
    remote_runtime_class: str | None = None
    """`gvisor`; by default the default isolation level."""
    enable_auto_lint: bool = False
    use_host_network: bool = False
    additional_networks: list[str] = []
    runtime_binding_address: str = "127.0.0.1"
    """The address where exposed ports listen on this machine. The default in OpenHands is every interface."""
    runtime_extra_build_args: list[str] | None = None
    initialize_plugins: bool = True
    """Without effect: there are no plugins."""
    force_rebuild_runtime: bool = False
    runtime_extra_deps: str | None = None
    """Shell commands that run in each new sandbox before anything else."""
    runtime_startup_env_vars: dict[str, str] = {}
    browsergym_eval_env: str | None = None
    platform: str | None = None
    """The platform of images; only that of this machine is accepted."""
    close_delay: int = Field(default=3600, gt=0)
    """Seconds without use after which a sandbox is ended."""
    remote_runtime_resource_factor: int = 1
    enable_gpu: bool = False
    docker_runtime_kwargs: dict[str, Any] | None = None
    selected_repo: str | None = None
    trusted_dirs: list[str] = []
    vscode_port: int | None = Field(default=None, ge=1, le=65535)
    """The port of this machine that leads to the editor of the first sandbox."""
    volumes: str | None = None
    """Volumes as `HOST:INSIDE[:MODE]`, separated by commas."""
    cuda_visible_devices: str | None = None

    @field_validator(*REFUSED)
    @classmethod
    def _only(cls, value: object, info: Any) -> object:
        allowed, why = REFUSED[info.field_name]
        if value != allowed and value not in (None, {}, []):
            raise ValueError(why)
        return value

    @field_validator("base_container_image")
    @classmethod
    def _image(cls, value: str | None) -> str:
        return value or _IMAGE

    @field_validator("remote_runtime_class")
    @classmethod
    def _class(cls, value: str | None) -> str | None:
        if value not in (None, "gvisor"):
            raise ValueError(f"there is no runtime class {value!r} here: leave it out, or use gvisor")
        return value

    @field_validator("remote_runtime_resource_factor")
    @classmethod
    def _factor(cls, value: int) -> int:
        if value not in (1, 2, 4, 8):
            raise ValueError("it must be 1, 2, 4 or 8")
        return value

    @field_validator("platform")
    @classmethod
    def _platform(cls, value: str | None) -> str | None:
        here = f"linux/{_ARCHITECTURE.get(machine.machine(), machine.machine())}"
        if value not in (None, here):
            raise ValueError(f"sandboxes run on the processor of this machine: {here}")
        return value

    @field_validator("volumes")
    @classmethod
    def _volumes(cls, value: str | None) -> str | None:
        _mounts(value)
        return value

    @property
    def mounts(self) -> list[VolumeMount]:
        return _mounts(self.volumes)

    @classmethod
    def from_toml_section(cls, data: dict[str, Any]) -> dict[str, Self]:
        """Return the settings under the name `sandbox`. Raises ValueError if a name or value is invalid."""
        try:
            return {"sandbox": cls.model_validate(data)}
        except ValidationError as error:
            raise ValueError(f"Invalid sandbox configuration: {error}") from error

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the settings from variables SANDBOX_NAME of the environment. Lists and tables are JSON."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            text = environ.get(_PREFIX + name.upper())
            if text:
                is_text = field.annotation in (str, str | None)
                values[name] = json.loads(text) if not is_text and text[:1] in "[{" else text
        return cls.from_toml_section(values)["sandbox"]


def _mounts(volumes: str | None) -> list[VolumeMount]:
    found: list[VolumeMount] = []
    for part in filter(None, (each.strip() for each in (volumes or "").split(","))):
        host, _, rest = part.partition(":")
        inside, _, mode = rest.partition(":")
        if not host or not inside.startswith("/") or mode not in ("", "rw", "ro"):
            raise ValueError(f"{part!r} is not a volume: write HOST:INSIDE, HOST:INSIDE:ro or HOST:INSIDE:rw")
        found.append(VolumeMount(host_path=host, container_path=inside, mode="ro" if mode == "ro" else "rw"))
    return found
