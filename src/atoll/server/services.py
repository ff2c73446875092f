"""The objects that routes work with, created when the server starts and closed when it ends."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll import durable
from atoll.archive import tree
from atoll.buffers import Budgets
from atoll.engines import registry
from atoll.engines.contract import Engine, ImageKeeping, Reachable
from atoll.errors import EngineUnavailableError
from atoll.images.access import Access, parse_places
from atoll.manager import Retention, SandboxManager
from atoll.sandbox.command import AsyncCommand
from atoll.server.admission import Admissions, RateLimiter
from atoll.server.request_metrics import Exposition, RequestMetrics
from atoll.server.settings import ServerSettings
from atoll.server.telemetry.relay import Relay
from atoll.server.tree_transfers import Transfers
from atoll.server.webhooks.delivery import Webhooks
from atoll.service import Identities, SandboxService, SandboxSpecService, UserService
from atoll.service.build_carrier import BuildCarrier
from atoll.service.credentials import TokenRules
from atoll.service.failures import hide
from atoll.service.image_builds import ImageBuildService
from atoll.service.image_transfers import ImageTransfers
from atoll.service.images import ImageService
from atoll.service.port_watch import PortWatch
from atoll.service.quotas import LimitCeilings
from atoll.service.runtime_view import origin_of
from atoll.service.runtimes import RuntimeService
from atoll.service.session_keys import SessionKeys
from atoll.service.volumes import VolumeService
from atoll.settings import Settings, owned_directory
from atoll.store import Store
from atoll.waiting import EventSignal

_SECRET_BYTES = 32


@dataclass(slots=True)
class Services:
    settings: ServerSettings
    engine: Engine
    store: Store
    manager: SandboxManager
    identities: Identities
    users: UserService
    specs: SandboxSpecService
    images: ImageService
    sandboxes: SandboxService
    runtimes: RuntimeService
    rate: RateLimiter
    happened: EventSignal
    """Notified whenever something happens to a sandbox."""
    webhooks: Webhooks
    admissions: Admissions
    transfers: Transfers
    image_transfers: ImageTransfers
    contexts: Transfers
    """The contexts of builds, which have a quota of their own."""
    builds: ImageBuildService
    relay: Relay | None
    """Passes on the telemetry of programs in sandboxes. None: the server accepts none."""
    metrics: RequestMetrics
    exposition: Exposition
    followed: dict[str, AsyncCommand] = field(default_factory=dict)
    """Commands whose output a client reads right now, by sandbox and id. Input for them goes over the same stream."""
    port_sockets: dict[str, int] = field(default_factory=dict)
    """Number of open WebSockets to exposed ports, by sandbox."""
    first_key: str | None = None
    """The administrator's key, on the first run only."""


@asynccontextmanager
async def services(
    settings: ServerSettings, installation: Settings | None = None, *, listens_on: str = ""
) -> AsyncIterator[Services]:
    owned_directory(settings.state_dir, 0o700)
    secret = _load_secret(settings.secret_path)
    store = Store(settings.database_url) if settings.database_url else Store.at(settings.state_dir / "atoll.db")
    installation = installation or Settings.load()
    if settings.registry_mirrors:
        installation = dataclasses.replace(installation, registry_mirrors=tuple(settings.registry_mirrors))
    hide(settings.state_dir, installation.data_dir, installation.run_dir)
    engine = _engine(settings, installation)
    happened = EventSignal()
    manager = SandboxManager(
        settings.max_num_sandboxes,
        settings.close_delay,
        min(300.0, settings.close_delay),
        engine="auto" if settings.engine == "auto" else engine,  # "auto" has others for some isolation levels
        settings=installation,
        state_dir=settings.state_dir / "manager",
        at_cap=settings.at_cap,
        on_idle=settings.on_idle,
        disk_timeout=settings.disk_delay,
        paused_timeout=settings.paused_delay,
        max_lifetime=settings.max_lifetime_s,
        at_exit="keep" if settings.keep_sandboxes else "delete",
        on_event=happened.notify,
        retention=Retention(
            ended_per_owner=settings.max_ended_records,
            events_per_owner=10 * settings.max_ended_records,
            age_s=settings.keep_ended_s,
        ),
    )
    port_watch = PortWatch(manager)
    manager.on_use(port_watch.used)
    try:
        await store.open()
        await manager.start()
        identities = Identities(store, secret, _token_rules(settings))
        users = UserService(store, identities, max_keys=settings.max_keys)
        ceilings = LimitCeilings(settings.ceilings(None if settings.engine == "remote" else installation.resources))
        specs = SandboxSpecService(
            store,
            manager,
            settings.default_spec_id,
            max_specs=settings.max_specs,
            ceilings=ceilings,
            max_images=settings.max_images,
            max_image_bytes=settings.max_image_bytes,
            access=Access(True, *parse_places(settings.registries), frozenset(settings.shared_registries)),
        )
        await specs.prepare()
        sandboxes = SandboxService(
            manager,
            specs,
            SessionKeys(secret),
            identities,
            public_url=settings.public_url or listens_on,
            ports_domain=settings.ports_domain,
            max_snapshots=settings.max_snapshots,
            volumes=VolumeService(
                manager,
                installation.resources.volumes,
                most=settings.max_volumes,
                most_bytes=settings.volume_bytes(None if settings.engine == "remote" else installation.resources),
            ),
            exposed_url_pattern=settings.exposed_url_pattern,
            relays_telemetry=settings.otlp_endpoint is not None,
        )
        kept_images = engine.images if isinstance(engine, ImageKeeping) else None
        images = ImageService(manager, engine, specs, kept_images)
        await sandboxes.startups.go_on()
        public_url = settings.public_url or listens_on
        runtimes = RuntimeService(
            sandboxes,
            network=settings.runtime_network,
            origin=origin_of(public_url),
            by_host=settings.runtime_hosts,
        )
        tree.remove(settings.transfers)  # what an earlier server left when it died
        owned_directory(settings.transfers, 0o700)
        rate = RateLimiter(settings.requests_per_s)
        webhooks = Webhooks(sandboxes, identities, happened, settings.webhook_hosts)
        transfers = Transfers(settings.transfers, settings.max_transfer_bytes)
        contexts = Transfers(settings.transfers, settings.max_context_bytes)
        builds = ImageBuildService(
            owned_directory(settings.builds, 0o700),
            settings.build_rules(),
            BuildCarrier(engine, kept_images, installation),
            manager=manager,
            specs=specs,
            snapshots=sandboxes.snapshots,
            reservations=sandboxes.reservations,
        )
        await builds.go_on()
        admissions = Admissions(
            settings.max_requests, Budgets(settings.max_buffered_bytes, 2 * settings.max_buffered_bytes)
        )
        relay = Relay(settings.otlp_endpoint) if settings.otlp_endpoint is not None else None
        metrics = RequestMetrics()
        sources = (manager.metric_families, sandboxes.metric_families, metrics.metric_families)
        made = Services(
            settings,
            engine,
            store,
            manager,
            identities,
            users,
            specs,
            images,
            sandboxes,
            runtimes,
            rate,
            happened,
            webhooks,
            admissions,
            transfers,
            ImageTransfers(kept_images, specs),
            contexts,
            builds,
            relay,
            metrics,
            Exposition(*sources, *([relay.metric_families] if relay is not None else [])),
        )
        made.first_key = await users.first_run()
        try:
            yield made
        finally:
            if relay is not None:
                await relay.aclose()
            await builds.aclose()
            await webhooks.aclose()
            await runtimes.aclose()
            await specs.aclose()
            await images.aclose()
            await sandboxes.startups.aclose()
    finally:
        await port_watch.aclose()
        await manager.cleanup(drain=0.0, timeout=30.0)
        await engine.aclose()
        await store.aclose()


def _load_secret(path: Path) -> bytes:
    """Return the server's secret, which is created at the first start. Two servers that start at once get the same
    one."""
    if not path.exists():
        durable.create(path, secrets.token_bytes(_SECRET_BYTES), sync=True)
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise EngineUnavailableError(
            f"'{path}' is not a secret of {_SECRET_BYTES} bytes", hint="Remove it to get a new one."
        )
    return secret


def _engine(settings: ServerSettings, installation: Settings) -> Engine:
    if settings.engine == "remote":
        engine = registry.remote(
            installation,
            None,
            None,
            resource_factor=settings.resource_factor,
            start_timeout=settings.start_timeout,
            polling_interval=settings.polling_interval,
        )
        if settings.public_url and isinstance(engine, Reachable):
            engine.receive_at(f"{settings.public_url.rstrip('/')}/api/v1/engine-events")
        return engine
    return registry.auto(installation)[0] if settings.engine == "auto" else registry.get(settings.engine, installation)


def _token_rules(settings: ServerSettings) -> TokenRules:
    key_file: Path | None = settings.jwt_public_key_file
    return TokenRules(
        algorithm=settings.jwt_algorithm,
        audience=settings.jwt_audience,
        issuer=settings.jwt_issuer,
        public_key=key_file.read_text() if key_file else None,
        jwks_url=settings.jwt_jwks_url,
    )
