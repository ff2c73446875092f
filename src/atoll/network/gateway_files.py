"""Where the gateway of an installation keeps what others must find."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from atoll.claims import Claims


@dataclass(frozen=True, slots=True)
class GatewayFiles:
    directory: Path

    @property
    def control(self) -> Path:
        return self.directory / "control"

    @property
    def lock(self) -> Path:
        """Held by the gateway as long as it lives."""
        return self.directory / "lock"

    @property
    def starting(self) -> Path:
        """Held by whoever starts it."""
        return self.directory / "starting"

    @property
    def router(self) -> Path:
        return self.directory / "router"

    @property
    def messages(self) -> Path:
        return self.directory / "messages"

    @property
    def members(self) -> Path:
        return self.directory / "members"

    def link_claims(self) -> Claims:
        """Which links, and with them which addresses, are whose on this machine."""
        return Claims("links", self.directory)

    def log(self, sandbox_id: str) -> Path:
        return self.members / f"{sandbox_id}.log"

    def authority(self, sandbox_id: str) -> Path:
        """The certificate authority of a sandbox, with its key. Not among what the gateway forgets when it ends."""
        return self.directory.parent / "authorities" / sandbox_id

    def member(self, sandbox_id: str) -> Path:
        """What the gateway wrote down of a sandbox with a link."""
        return self.members / f"{sandbox_id}.json"

    def is_member(self, sandbox_id: str) -> bool:
        return self.member(sandbox_id).exists()

    def is_router_there(self) -> bool:
        try:
            return os.stat(self.router).st_dev == os.stat("/proc/self/ns/net").st_dev
        except FileNotFoundError:
            return False

    def forget_members(self) -> None:
        """Of a router that is gone, as after a restart of the machine."""
        for path in self.members.glob("*"):
            path.unlink(missing_ok=True)
