"""OpenHands's three services. They differ in the engine that makes the sandboxes."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.compat.openhands.config import SandboxConfig
from atoll.compat.openhands.managed_service import ManagedSandboxService
from atoll.engines import registry
from atoll.engines.contract import Engine
from atoll.model.network_policy import NetworkPolicy
from atoll.settings import Settings


@dataclass(kw_only=True)
class DockerSandboxService(ManagedSandboxService):
    engine = "docker"

    @property
    def default_image(self) -> str:  # type: ignore[override]
        return self.config.base_container_image or ""


@dataclass(kw_only=True)
class ProcessSandboxService(ManagedSandboxService):
    """Over the programs of this machine, in namespaces of their own. The engine has no network to give."""

    engine = "bubblewrap"
    network: NetworkPolicy = "none"


@dataclass(kw_only=True)
class RemoteSandboxService(ManagedSandboxService):
    """The sandboxes are those of an Atoll server; `api_url` may be that of its runtime API."""

    engine = "remote"
    api_url: str = ""
    api_key: str = ""
    polling_interval: float = 15
    resource_factor: int | None = None
    runtime_class: str | None = None
    start_sandbox_timeout: float | None = None
    max_num_sandboxes: int = 10

    def __post_init__(self) -> None:
        if self.runtime_class is not None:
            values = {**self.config.model_dump(exclude_unset=True), "remote_runtime_class": self.runtime_class}
            self.config = SandboxConfig.from_toml_section(values)["sandbox"]
        super().__post_init__()

    def _engine(self, settings: Settings) -> str | Engine:
        url = self.api_url or self.config.remote_runtime_api_url or ""
        limit = min(self.config.remote_runtime_init_timeout, self.config.remote_runtime_api_timeout)
        return registry.remote(
            settings,
            url.rstrip("/").removesuffix("/runtime"),
            self.api_key or self.config.api_key,
            resource_factor=self.resource_factor or self.config.remote_runtime_resource_factor,
            start_timeout=self.start_sandbox_timeout or limit,
            polling_interval=self.polling_interval,
        )
