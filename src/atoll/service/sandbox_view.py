"""What a caller may see of a sandbox. Labels of the service itself are left out."""

from __future__ import annotations

from datetime import UTC, datetime

from atoll.manager import Record
from atoll.model import default_user, effective_limits, image_defaults
from atoll.model.state import SandboxStatus
from atoll.service import exposed_ports, startup
from atoll.service.callback_messages import CALLBACK_LABEL
from atoll.service.caller import Caller
from atoll.service.failures import without_paths
from atoll.service.models.exposed_port import ExposedUrl
from atoll.service.models.sandbox_info import CommandEndInfo, SandboxInfo
from atoll.service.sandbox_credentials import SandboxCredentials
from atoll.service.sandbox_telemetry import TELEMETRY_LABEL
from atoll.service.snapshots import shown_image

SPEC_LABEL = "sandbox_spec_id"
IN_PLACE = ""
"""The spec id of a sandbox whose request described it directly."""
_OWN_LABELS = (
    SPEC_LABEL,
    exposed_ports.PORT_LABEL,
    *startup.HEALTH_LABELS,
    CALLBACK_LABEL,
    TELEMETRY_LABEL,
    "runtime_session_id",
)


class SandboxView:
    def __init__(self, credentials: SandboxCredentials, urls: exposed_ports.PortUrls) -> None:
        self._credentials = credentials
        self._urls = urls

    def info(self, caller: Caller, record: Record) -> SandboxInfo:
        status, reason = startup.status_of(record)
        running = status is SandboxStatus.RUNNING
        held = effective_limits(record.spec, record.details)
        labels = {name: value for name, value in record.labels.items() if not name.startswith(_OWN_LABELS)}
        return SandboxInfo(
            id=record.id,
            created_by_user_id=record.owner,
            sandbox_spec_id=record.labels.get(SPEC_LABEL, IN_PLACE),
            status=status,
            session_api_key=self._credentials.session_key(caller, record) if running else None,
            exposed_urls=self.urls(caller, record) if running else None,
            created_at=_moment(record.created_at) or datetime.now(UTC),
            name=record.name,
            labels=labels,
            state=record.state,
            cause=record.cause,
            reason=without_paths(reason),
            engine=record.engine,
            image=shown_image(record.spec.image, record.owner),
            isolation=record.details.get("isolation", record.spec.isolation),
            work_dir=record.spec.directory,
            user=default_user(record.spec),
            image_defaults=image_defaults(record.details),
            limits=record.spec.limits,
            effective_limits=held.limits,
            limits_left_out=list(held.left_out),
            expires_at=_moment(record.expires_at),
            leased_until=_moment(record.leased_until),
            paused_by=record.paused_by,
            command_end=CommandEndInfo.of(record.command_end) if record.command_end is not None else None,
            ended_at=_moment(record.ended_at),
        )

    def urls(self, caller: Caller, record: Record) -> list[ExposedUrl]:
        """Return the URLs of exposed ports. Callers who may use the sandbox see the token of VS Code, which programs
        inside know too."""
        has_vscode = f"{exposed_ports.PORT_LABEL}{exposed_ports.VSCODE}" in record.labels
        may_use = has_vscode and self._credentials.session_key(caller, record) is not None
        return self._urls.of(record, self._credentials.inside_key(record.id, record.owner) if may_use else None)


def refuse_own_labels(labels: dict[str, str]) -> None:
    """Raise ValueError for labels that only the service sets."""
    for label in labels:
        if label.startswith(_OWN_LABELS):
            raise ValueError(f"the label {label!r} is reserved for the service")


def _moment(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None
