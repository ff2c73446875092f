"""The routes, one module for each noun. Each route names the scope that its caller needs."""

from fastapi import APIRouter

from atoll.server.routes import (
    callbacks,
    checkpoints,
    commands,
    events,
    files,
    health,
    image_builds,
    image_transfers,
    images,
    keys,
    limits,
    network,
    ports,
    sandboxes,
    snapshots,
    sockets,
    specs,
    telemetry,
    users,
    volumes,
    webhooks,
)

# They are tried in this order: what is asked most comes first.
ROUTERS: tuple[APIRouter, ...] = (
    commands.router,
    files.router,
    sandboxes.router,
    checkpoints.router,
    snapshots.router,
    snapshots.of_sandbox,
    image_builds.router,
    image_transfers.router,
    volumes.router,
    health.router,
    specs.router,
    images.router,
    events.router,
    sockets.router,
    network.router,
    limits.router,
    ports.router,
    ports.links,
    keys.router,
    users.router,
    webhooks.router,
    callbacks.router,
    telemetry.router,
)
