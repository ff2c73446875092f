"""OpenHands runtimes as their users see them: states, URLs and keys in the words of OpenHands."""

from __future__ import annotations

from urllib.parse import urlsplit

from atoll.model.state import SandboxStatus
from atoll.service.caller import Caller, Scope
from atoll.service.models.openhands_runtime import PORTS, SERVICES, STATUSES, RuntimeInfo, RuntimeStart
from atoll.service.models.sandbox_info import CommandEndInfo, SandboxInfo
from atoll.service.sandbox_credentials import SandboxCredentials

UNMADE = "unmade."
"""Prefix of the id of a runtime without a sandbox. The session id follows."""


class RuntimeView:
    def __init__(self, credentials: SandboxCredentials, *, origin: str, by_host: bool) -> None:
        """`origin` is that of the server's public URL. `by_host` says that runtimes have host names that lead to this
        server."""
        self._credentials = credentials
        self._origin = origin
        self._by_host = by_host

    def info(self, caller: Caller, info: SandboxInfo, session_id: str) -> RuntimeInfo:
        # A runtime whose agent server has ended has failed, even if its sandbox runs.
        at = SandboxStatus.ERROR if info.command_end is not None and info.status == "RUNNING" else info.status
        running = at is SandboxStatus.RUNNING
        status, pod_status = STATUSES[at]
        urls = self._urls(info) if running else {}
        key = self._credentials.inside_key(info.id, info.created_by_user_id)
        reason = info.reason if info.command_end is None else _ending(info.command_end)
        return RuntimeInfo(
            runtime_id=info.id,
            session_id=session_id,
            status=status,
            pod_status=pod_status,
            reason="" if running else reason,
            url=urls.get("AGENT_SERVER"),
            work_hosts={urls[name]: PORTS[name] for name in ("WORKER_1", "WORKER_2") if name in urls},
            session_api_key=key if status in ("running", "starting") and Scope.USE in caller.scopes else None,
            image=info.image,
            working_dir=info.work_dir,
            created_at=info.created_at,
        )

    def _urls(self, info: SandboxInfo) -> dict[str, str]:
        """Return the URLs that OpenHands derives from that of the agent server, which has no trailing slash."""
        named = {each.name: each for each in info.exposed_urls or ()}
        agent = named.get("AGENT_SERVER")
        base = agent.host_url if agent is not None and self._by_host else None
        if agent is None or (self._by_host and base is None):
            return {}
        if base is None:
            base = f"{self._origin}/{info.id}"
            return {"AGENT_SERVER": base} | {_name(port): f"{base}/{name}" for name, port in SERVICES.items()}
        scheme, _, host = base.rstrip("/").partition("://")
        return {"AGENT_SERVER": base.rstrip("/")} | {
            _name(port): f"{scheme}://{name}-{host}" for name, port in SERVICES.items()
        }


def unmade(wanted: RuntimeStart, *, starting: bool, reason: str = "") -> RuntimeInfo:
    """Return a runtime that has no sandbox yet, or could not get one."""
    status, pod_status = STATUSES[SandboxStatus.STARTING if starting else SandboxStatus.ERROR]
    return RuntimeInfo(
        runtime_id=UNMADE + wanted.session_id,
        session_id=wanted.session_id,
        status=status,
        pod_status=pod_status,
        reason=reason,
        image=wanted.image,
        working_dir=wanted.working_dir,
    )


def stopped(shown: RuntimeInfo) -> RuntimeInfo:
    status, pod_status = STATUSES[SandboxStatus.MISSING]
    nowhere: dict[str, object] = {"url": None, "work_hosts": {}, "session_api_key": None}
    return shown.model_copy(update={"status": status, "pod_status": pod_status, **nowhere})


def origin_of(url: str) -> str:
    found = urlsplit(url)
    return f"{found.scheme}://{found.netloc}" if found.netloc else ""


def _name(port: int) -> str:
    return next(name for name, each in PORTS.items() if each == port)


def _ending(end: CommandEndInfo) -> str:
    code = "" if end.exit_code is None else f" with exit code {end.exit_code}"
    return f"its command has ended{code}: {end.output[-500:].strip() or end.cause}"
