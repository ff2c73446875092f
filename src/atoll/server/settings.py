"""The settings of a server: arguments, before variables of the environment, before a TOML file, before defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from atoll.builds.mirrors import parse as parse_mirrors
from atoll.errors import SpecError
from atoll.manager import OnIdle
from atoll.model import Limits, Size
from atoll.resources import Resources
from atoll.server.setting_sources import PREFIX, ServerTable, Variables, unknown_variables, variable_of
from atoll.service.exposed_ports import check_pattern
from atoll.service.image_builds import BuildRules
from atoll.settings import Settings


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError("write http://HOST:PORT, without a user or a query")
    return url


def _switch(value: object) -> object:
    """Accept true and false in place of a list."""
    return (["true"] if value else []) if isinstance(value, bool) else value


class ServerSettings(BaseSettings):
    """The settings of a server. Each can be given as `name = value` in the table `[server]`, or as ATOLL_NAME in the
    environment."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=PREFIX, case_sensitive=True)

    host: str = Field("127.0.0.1", description="The address to listen on.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8420, description="The port to listen on; 0: any that is free.")
    state_dir: Path = Field(description="Where the server keeps its secret, its database and the manager's journal.")
    database_url: str | None = Field(
        None, description="postgresql://USER@HOST/NAME; without it SQLite in the state directory."
    )
    engine: str = Field(
        "auto",
        description="Which engine makes the sandboxes; auto: the first of native, oci and bubblewrap that works.",
    )
    public_url: str = Field(
        "",
        description="Where others reach this server: for the URLs of exposed ports, and messages of a remote engine.",
    )
    ports_domain: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")] = Field(
        "localhost",
        description="Exposed ports are served at PORT-ID.DOMAIN. Any domain but localhost needs a wildcard in DNS.",
    )
    exposed_url_pattern: Annotated[str, AfterValidator(check_pattern)] | None = Field(
        None,
        description="URLs of exposed ports where a proxy of your own leads to them, with {public_url}, {sandbox_id},"
        " {port} and {name}; default: by path on this server.",
    )
    otlp_endpoint: Annotated[str, AfterValidator(_http_url)] | None = Field(
        None,
        description="URL of the collector (OTLP over HTTP) that telemetry of programs in sandboxes is passed on to;"
        " without it none is accepted.",
    )
    runtime_urls: Literal["auto", "host", "path"] = Field(
        "auto",
        description="URLs of runtimes by host name or by path; auto: by host name if ports_domain is not localhost.",
    )
    runtime_network: Literal["all", "none"] = Field(
        "all", description="What runtimes reach: the public network, which an agent server needs, or nothing."
    )
    polling_interval: Annotated[float, Field(gt=0)] = Field(
        15,
        description="With the engine remote: seconds between polls for events, where webhooks cannot be used.",
    )
    resource_factor: Annotated[float, Field(gt=0)] = Field(
        1, description="With the engine remote: factor for the memory and CPUs that are requested there."
    )
    start_timeout: Annotated[float, Field(gt=0)] = Field(
        120, description="With the engine remote: the most seconds that the start of a sandbox may take."
    )
    webhook_hosts: list[str] = Field([], description="Hosts that events may be posted to even if not public.")
    registries: list[str] = Field(
        [],
        description="HOST, HOST:PORT or ranges of addresses that users may pull images from even if not public.",
    )
    registry_mirrors: list[str] = Field(
        [],
        description="Mirrors that are asked before a registry: HOST, http://HOST:PORT or REGISTRY=HOST; default:"
        " those of the installation.",
    )
    shared_registries: list[str] = Field(
        [], description="Registries for which the operator's login is used for every user, not only for administrators."
    )
    default_spec_id: str = Field("default", description="The spec of a sandbox that names none.")
    max_num_sandboxes: Annotated[int, Field(ge=1)] = Field(100, description="The most sandboxes, of all users.")
    at_cap: Literal["refuse", "pause", "pause-any"] = Field(
        "refuse",
        description="At the cap: refuse, or pause the user's own sandbox that was idle longest, or anybody's.",
    )
    max_snapshots: Annotated[int, Field(ge=0)] = Field(
        100, description="The most snapshots of each user who has no quota of their own."
    )
    max_volumes: Annotated[int, Field(ge=0)] = Field(
        100, description="The most named volumes of each user who has no quota of their own."
    )
    max_volume_bytes: Annotated[Size, Field(ge=1 << 20)] | None = Field(
        None,
        description="The most bytes that the volumes of each such user may hold; default: four times the default size.",
    )
    max_images: Annotated[int, Field(ge=0)] = Field(
        200, description="The most images of each user who has no quota of their own and is no administrator."
    )
    max_image_bytes: Annotated[Size, Field(ge=0)] = Field(
        32 << 30, description="The most space that the images of each such user may take, without those of everybody."
    )
    max_specs: Annotated[int, Field(ge=0)] = Field(
        100, description="The most specs of each user who has no quota of their own."
    )
    max_keys: Annotated[int, Field(ge=0)] = Field(
        100, description="The most valid API keys of each user who has no quota of their own."
    )
    max_sandbox_memory_bytes: Annotated[Size, Field(ge=4 << 20)] | None = Field(
        None, description="The most memory of one sandbox of a non-administrator; default: half of what all may use."
    )
    max_sandbox_cpus: Annotated[float, Field(gt=0)] | None = Field(
        None, description="The most CPUs of one such sandbox; default: those of the machine."
    )
    max_sandbox_pids: Annotated[int, Field(ge=2)] | None = Field(
        None, description="The most processes of one such sandbox; default: a quarter of what all may have."
    )
    max_sandbox_disk_bytes: Annotated[Size, Field(ge=1 << 20)] | None = Field(
        None, description="The largest disk of one such sandbox; default: four times the default disk limit."
    )
    max_sandbox_open_files: Annotated[int, Field(ge=16)] | None = Field(
        65_536, description="The most open files of each process of one such sandbox."
    )
    max_ended_records: Annotated[int, Field(ge=1)] = Field(
        1000, description="How many ended sandboxes of each user are remembered, with ten events for each."
    )
    keep_ended_s: Annotated[float, Field(gt=0)] = Field(
        30 * 86400, description="How many seconds ended sandboxes are remembered, at most."
    )
    close_delay: Annotated[float, Field(gt=0)] = Field(
        3600, description="Seconds without use after which a sandbox is idle and `on_idle` applies."
    )
    on_idle: OnIdle = Field(
        "end",
        description="What happens to an idle sandbox: end, pause, or disk (pause to the disk, where the engine can).",
    )
    disk_delay: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds after which a paused sandbox moves to the disk, where the engine can."
    )
    paused_delay: Annotated[float, Field(gt=0)] = Field(
        7 * 86400, description="Seconds after which a paused sandbox that nobody used is deleted."
    )
    max_lifetime_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="The most seconds that a sandbox may exist."
    )
    keep_sandboxes: bool = Field(True, description="Whether sandboxes outlive the server and are adopted by the next.")
    timeout: Annotated[float, Field(gt=0)] = Field(120, description="Seconds for a command that names none.")
    requests_per_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Requests per second of each user who has no rate of their own."
    )
    max_requests: Annotated[int, Field(ge=1)] = Field(
        256, description="The most concurrent requests and WebSockets of one user."
    )
    max_buffered_bytes: Annotated[int, Field(ge=1 << 20)] = Field(
        96 << 20,
        description="The most bytes held in memory for one user: outputs, lists, bodies. Twice that for all users.",
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(8 << 20, description="The largest body of a request.")
    max_upload_bytes: Annotated[int, Field(ge=1024)] = Field(4 << 30, description="The largest file or tree.")
    max_transfer_bytes: Annotated[int, Field(ge=1 << 20)] = Field(
        8 << 30, description="The most bytes of one user's trees and snapshots in transit on the server's disk."
    )
    max_builds: Annotated[int, Field(ge=1)] = Field(4, description="The most builds of images at once, of all users.")
    max_user_builds: Annotated[int, Field(ge=1)] = Field(
        2, description="The most builds of one user at once. Further ones wait for their turn."
    )
    max_waiting_builds: Annotated[int, Field(ge=1)] = Field(
        20, description="The most builds of one user that wait or run."
    )
    max_ended_builds: Annotated[int, Field(ge=1)] = Field(
        50, description="How many ended builds of each user are remembered with their logs, for `keep_ended_s` at most."
    )
    max_build_s: Annotated[float, Field(gt=0)] = Field(
        3600, description="The most seconds that a build may take, and so may the upload of its context."
    )
    max_build_log_bytes: Annotated[int, Field(ge=4096)] = Field(
        4 << 20, description="The most output of a build that is kept."
    )
    max_context_bytes: Annotated[int, Field(ge=1 << 20)] = Field(
        4 << 30, description="The most bytes of the contexts of one user's builds that wait or run."
    )
    build_mirrors: Annotated[list[str], BeforeValidator(_switch)] = Field(
        [],
        description="Whether steps of users' builds get this machine's own configuration of apt, pip and npm: true, or"
        " the only hosts that they may use of it.",
    )
    build_network: Literal["none", "all"] = Field(
        "none",
        description="What the steps of builds reach that name no network policy: the public network, or nothing.",
    )
    slow_s: Annotated[float, Field(gt=0)] = Field(
        30,
        description="Seconds without progress after which a client that sends or receives is disconnected.",
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        10, description="Seconds that requests in progress have after SIGTERM."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least important lines that the log has; info: one line for each request."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="Lines of JSON, or text for people; auto: text if the log goes to a terminal."
    )
    jwt_algorithm: Literal["HS256", "RS256", "ES256"] = Field(
        "HS256", description="The algorithm that tokens must be signed with."
    )
    jwt_audience: str = Field("atoll", description="The audience that tokens must name.")
    jwt_issuer: str | None = Field(None, description="The issuer that tokens must name.")
    jwt_public_key_file: Path | None = Field(None, description="With RS256 or ES256: the key, as PEM.")
    jwt_jwks_url: str | None = Field(None, description="With RS256 or ES256: where the provider lists its keys.")
    cors_origins: list[str] = Field([], description="Web pages of these origins may use the server.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: list[str] = PrivateAttr(default_factory=list)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Settings made by hand have the values that they are given and defaults. Only `load` looks anywhere else."""
        return (init_settings,)

    @classmethod
    def load(
        cls, environ: Mapping[str, str] | None = None, *, file: Path | None = None, **given: object
    ) -> ServerSettings:
        """Load the settings. The file is ATOLL_CONFIG, or /etc/atoll/server.toml if there is one. Raises SpecError."""
        environ = os.environ if environ is None else environ
        file = file or _customary(environ)
        table, variables = ServerTable(cls, file)(), Variables(cls, environ)()
        arguments = {name: value for name, value in given.items() if value is not None}
        values: dict[str, Any] = table | variables | arguments
        values.setdefault("state_dir", Settings.load(environ).data_dir / "server")
        origins = dict.fromkeys(table, str(file))
        origins |= {name: variable_of(name) for name in variables} | dict.fromkeys(arguments, "argument")
        try:
            settings = cls(**values)
        except ValidationError as error:
            raise _invalid(error, origins) from None  # the cause would show the value, which may be secret
        if settings.jwt_algorithm != "HS256" and not (settings.jwt_public_key_file or settings.jwt_jwks_url):
            raise SpecError(
                f"{settings.jwt_algorithm} needs jwt_public_key_file or jwt_jwks_url",
                hint=f"Set one of them, or correct {origins['jwt_algorithm']}.",
            )
        settings._origins, settings._warnings = origins, unknown_variables(environ, cls.model_fields)
        return settings

    def origin(self, name: str) -> str:
        """Return where the value of a setting comes from: `default`, `argument`, a variable or a file."""
        return self._origins.get(name, "default")

    @property
    def warnings(self) -> list[str]:
        """Sentences about variables that were probably meant as settings."""
        return list(self._warnings)

    @property
    def runtime_hosts(self) -> bool:
        """Whether the URLs of runtimes use host names. Names below `localhost` are unknown to most programs."""
        return self.runtime_urls == "host" or (self.runtime_urls == "auto" and self.ports_domain != "localhost")

    def ceilings(self, resources: Resources | None) -> Limits:
        """Return the maximum limits of one sandbox of a user who is not an administrator.

        `resources` are those of this machine if sandboxes run on it. For another machine, only the limits in the
        settings are known.
        """
        most = Limits(
            memory_bytes=self.max_sandbox_memory_bytes,
            cpus=self.max_sandbox_cpus,
            pids=self.max_sandbox_pids,
            disk_bytes=self.max_sandbox_disk_bytes,
            open_files=self.max_sandbox_open_files,
        )
        if resources is None:
            return most
        disk = resources.sandbox.disk_bytes
        machine = Limits(
            memory_bytes=resources.account.memory_bytes,
            cpus=float(os.cpu_count() or 1),
            pids=resources.account.pids,
            disk_bytes=None if disk is None else 4 * disk,
        )
        return most.over(machine)

    def volume_bytes(self, resources: Resources | None) -> int | None:
        """Return how much the volumes of a user without a quota of their own may hold. `resources` as in `ceilings`."""
        if self.max_volume_bytes is not None or resources is None:
            return self.max_volume_bytes
        return 4 * resources.volumes.default_bytes

    @property
    def transfers(self) -> Path:
        """The directory of files in transit."""
        return self.state_dir / "transfers"

    @property
    def builds(self) -> Path:
        """The directory of the records and logs of builds."""
        return self.state_dir / "builds"

    def build_rules(self) -> BuildRules:
        return BuildRules(
            at_once=self.max_builds,
            at_once_of_one=self.max_user_builds,
            waiting_of_one=self.max_waiting_builds,
            kept_of_one=self.max_ended_builds,
            kept_s=self.keep_ended_s,
            log_bytes=self.max_build_log_bytes,
            timeout_s=self.max_build_s,
            network=self.build_network,
            mirrors=parse_mirrors(",".join(self.build_mirrors)) or False,
        )

    @property
    def secret_path(self) -> Path:
        return self.state_dir / "secret"


def _customary(environ: Mapping[str, str]) -> Path | None:
    named = environ.get("ATOLL_CONFIG")
    if named:
        return Path(named)
    usual = Path("/etc/atoll/server.toml")
    return usual if usual.exists() else None


def _invalid(error: ValidationError, origins: Mapping[str, str]) -> SpecError:
    detail = error.errors(include_url=False, include_input=False)[0]
    name = str(detail["loc"][0])
    origin = origins.get(name, "default")
    if origin in ("argument", "default"):
        hint = f"Correct the argument for {name}." if origin == "argument" else f"Set {variable_of(name)}."
    else:
        hint = f"Correct {origin}." if origin == variable_of(name) else f"Correct {name} in '{origin}'."
    return SpecError(f"Invalid server configuration: {name}: {detail['msg']}", hint=hint)
