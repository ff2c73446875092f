"""Who may use which route: a line for each that there is. A route without a line fails the tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.server.app import bare_app

SOCKET = "SOCKET"
"""The method of a WebSocket, for our purposes."""


@dataclass(frozen=True)
class Line:
    method: str
    path: str
    """Below /api/v1, or from the root if it begins with /runtime."""
    scope: str
    """What a key needs. `public`: nothing; `mark`: what is in the request itself is the credential; `session`: the
    session key of a sandbox, and nothing else."""
    session: bool = False
    """Whether the session key of the sandbox is good too."""
    body: Any = None
    ends: bool = False
    """Whether the sandbox is not what it was afterwards."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


IN = "/sandboxes/{sandbox_id}"
COMMAND = {"command": "true"}
PORT = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

MATRIX = (
    Line("GET", "/openapi.json", "public"),
    Line("GET", "/health", "public"),
    Line("GET", "/info", "read"),
    Line("GET", "/metrics", "admin"),
    Line("POST", "/engine-events", "mark", body={}),
    # sandboxes
    Line("GET", "/sandboxes/search", "read"),
    Line("GET", "/sandboxes", "read"),
    Line("POST", "/sandboxes", "manage", body={"sandbox_spec_id": "no-such-spec"}),
    Line("POST", "/sandboxes/pause-old", "manage", body={"max_num_sandboxes": 1000}),
    Line("GET", "/sandboxes/by-session-key", "session"),
    Line("GET", IN, "read", True),
    Line("DELETE", IN, "manage", ends=True),
    Line("POST", f"{IN}/pause", "manage", ends=True),
    Line("POST", f"{IN}/resume", "manage"),
    Line("GET", f"{IN}/wait", "read", True),
    Line("PUT", f"{IN}/expiry", "manage", body={"lifetime_s": 1000}),
    Line("POST", f"{IN}/keep-alive", "use", True, {"seconds": 1}),
    Line("GET", f"{IN}/settings", "read", True),
    Line("GET", f"{IN}/stats", "read", True),
    Line("GET", f"{IN}/logs", "read", True),
    # commands
    Line("POST", f"{IN}/exec", "use", True, COMMAND),
    Line("POST", f"{IN}/exec/stream", "use", True, COMMAND),
    Line("POST", f"{IN}/shell", "use", True, COMMAND),
    Line("POST", f"{IN}/commands", "use", True, COMMAND),
    Line("GET", f"{IN}/commands", "read", True),
    Line("GET", f"{IN}/commands/{{command_id}}", "read", True),
    Line("GET", f"{IN}/commands/{{command_id}}/result", "read", True),
    Line("POST", f"{IN}/commands/{{command_id}}/kill", "use", True, {}),
    Line("POST", f"{IN}/commands/{{command_id}}/stdin", "use", True),
    Line(SOCKET, f"{IN}/terminal", "use", True),
    Line(SOCKET, f"{IN}/agent", "use", True),
    # files
    Line("GET", f"{IN}/files", "read", True),
    Line("DELETE", f"{IN}/files", "use", True),
    Line("GET", f"{IN}/files/content", "read", True),
    Line("PUT", f"{IN}/files/content", "use", True),
    Line("POST", f"{IN}/files/append", "use", True),
    Line("GET", f"{IN}/files/tree", "read", True),
    Line("PUT", f"{IN}/files/tree", "use", True),
    Line("GET", f"{IN}/files/stat", "read", True),
    Line("POST", f"{IN}/files/move", "use", True, {"path": "a", "target": "b"}),
    Line("POST", f"{IN}/files/mkdir", "use", True, {"path": "a"}),
    Line("POST", f"{IN}/files/chmod", "use", True, {"path": "a", "mode": "644"}),
    Line("GET", f"{IN}/files/watch", "read", True),
    # saved states
    Line("POST", f"{IN}/checkpoints", "use", True),
    Line("GET", f"{IN}/checkpoints", "read", True),
    Line("GET", f"{IN}/checkpoints/{{checkpoint_id}}", "read", True),
    Line("DELETE", f"{IN}/checkpoints/{{checkpoint_id}}", "use", True),
    Line("GET", f"{IN}/checkpoints/{{checkpoint_id}}/diff", "read", True),
    Line("POST", f"{IN}/checkpoints/{{checkpoint_id}}/rollback", "use", True),
    Line("POST", f"{IN}/restart", "use", True),
    Line("POST", f"{IN}/undo", "use", True),
    Line("POST", f"{IN}/fork", "manage", body={"checkpoint": "no-such"}),
    Line("POST", f"{IN}/snapshots", "manage", body={"name": "s", "checkpoint": "no-such"}),
    Line("GET", "/snapshots", "read"),
    Line("GET", "/snapshots/{name}", "read"),
    Line("DELETE", "/snapshots/{name}", "manage"),
    Line("GET", "/snapshots/{name}/content", "use"),
    Line("PUT", "/snapshots/{name}/content", "manage"),
    # volumes
    Line("GET", "/volumes", "read"),
    Line("POST", "/volumes", "manage", body={"name": "v"}),
    Line("GET", "/volumes/{name}", "read"),
    Line("DELETE", "/volumes/{name}", "manage"),
    Line("POST", "/volumes/{name}/copies", "manage", body={"name": "w"}),
    Line("POST", "/volumes/{name}/restore", "manage", body={"source": "w"}),
    Line("GET", "/volumes/{name}/tree", "manage"),
    Line("PUT", "/volumes/{name}/tree", "manage"),
    # images
    Line("POST", "/images/builds", "manage"),
    Line("GET", "/images/builds", "read"),
    Line("GET", "/images/builds/{build_id}", "read"),
    Line("DELETE", "/images/builds/{build_id}", "manage"),
    Line("GET", "/images/builds/{build_id}/logs", "read"),
    Line("POST", "/images/push", "use", body={"name": "no-such"}),
    Line("GET", "/images/content", "use"),
    Line("PUT", "/images/content", "manage"),
    # network and ports
    Line("GET", f"{IN}/network", "read", True),
    Line("GET", f"{IN}/limits", "read", True),
    Line("PATCH", f"{IN}/limits", "manage", body={"pids": 100}),
    Line("PUT", f"{IN}/network", "manage", body={"policy": "none"}),
    Line("POST", f"{IN}/port-links", "use", True, {"port": 8000}),
    Line("GET", f"{IN}/ports", "read", True),
    Line("POST", f"{IN}/ports", "manage", body={"name": "WEB", "port": 8000}),
    Line("DELETE", f"{IN}/ports/{{port}}", "manage", ends=True),
    *(Line(method, f"{IN}/ports/{{port}}/{{path:path}}", "use", True) for method in (*PORT, SOCKET)),
    # the catalogue
    Line("GET", "/sandbox-specs/search", "read"),
    Line("GET", "/sandbox-specs", "read"),
    Line("GET", "/sandbox-specs/default", "read"),
    Line("POST", "/sandbox-specs", "manage", body={"id": "default"}),
    Line("GET", "/sandbox-specs/{spec_id}", "read"),
    Line("DELETE", "/sandbox-specs/{spec_id}", "manage"),
    Line("POST", "/sandbox-specs/{spec_id}/pull", "manage"),
    # images
    Line("GET", "/images", "read"),
    Line("GET", "/images/inspect", "read"),
    Line("DELETE", "/images", "manage"),
    Line("POST", "/images/pull", "manage", body={"name": "127.0.0.1:1/a/b"}),
    Line("POST", "/images/prune", "manage", body={}),
    Line("PUT", "/images/sharing", "admin", body={"name": "no-such", "shared": True}),
    # events
    Line("GET", "/events", "read"),
    Line("GET", "/events/stream", "read"),
    Line("GET", "/webhooks", "read"),
    Line("PUT", "/webhooks", "manage", body={"url": "http://127.0.0.1:1/", "secret": "00" * 32}),
    Line("DELETE", "/webhooks/{webhook_id}", "manage"),
    Line("POST", "/webhooks/{sandbox_id}/conversations", "session", body={"id": "c"}),
    Line("POST", "/webhooks/{sandbox_id}/events/{conversation_id}", "session", body=[{"kind": "x"}]),
    Line("GET", "/webhooks/secrets", "nobody"),
    Line("POST", "/otlp/{sandbox_id}/v1/{signal}", "nobody", body={}),
    # runtimes
    Line("POST", "/runtime/start", "manage", body={"image": "no-such:image", "session_id": "x"}),
    *(Line("POST", f"/runtime/{act}", "manage", body={"runtime_id": "none"}) for act in ("stop", "pause", "resume")),
    Line("GET", "/runtime/list", "read"),
    Line("GET", "/runtime/sessions/batch", "read"),
    Line("GET", "/runtime/sessions/{session_id}", "read"),
    Line("GET", "/runtime/runtime/{runtime_id}", "read"),
    # keys and users
    Line("GET", "/keys", "keys"),
    Line("POST", "/keys", "keys", body={"user_id": "ann", "scopes": ["read"]}),
    Line("DELETE", "/keys/{key_id}", "keys"),
    Line("POST", "/tokens", "keys", body={"scopes": ["keys"]}),
    Line("GET", "/users", "admin"),
    Line("POST", "/users", "admin", body={"id": "ann"}),
    Line("GET", "/users/{user_id}", "admin"),
    Line("PATCH", "/users/{user_id}", "admin", body={}),
)

LINKS = tuple(Line(method, f"{IN}/ports/{{port}}/~{{mark}}/{{path:path}}", "mark") for method in (*PORT, SOCKET))
"""What the routes of ports answer if a link is in the path."""


def routes() -> Iterator[tuple[str, str]]:
    """Every method and path that the application answers, also what openapi.json does not show."""

    def collect(found: list[Any], prefix: str) -> Iterator[tuple[str, str]]:
        for route in found:
            if hasattr(route, "original_router"):
                yield from collect(route.original_router.routes, prefix + route.include_context.prefix)
                continue
            path = prefix + route.path
            for method in getattr(route, "methods", None) or {SOCKET}:
                if not (method == "HEAD" and path.endswith("/openapi.json")):
                    yield method, path

    yield from collect(list(bare_app().routes), "")
