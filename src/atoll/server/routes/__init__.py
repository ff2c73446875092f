"""The routes, one module for each noun. Each route names the scope that its caller needs."""

from fastapi import APIRouter

from atoll.server.routes import commands, events, files, health, keys, ports, sandboxes, sockets, specs, users

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    sandboxes.router,
    specs.router,
    commands.router,
    files.router,
    events.router,
    sockets.router,
    ports.router,
    keys.router,
    users.router,
)
