"""The paths of the gateway's files that other processes use."""

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
        """The lock that the gateway holds as long as it runs."""
        return self.directory / "lock"

    @property
    def starting(self) -> Path:
        """The lock that a process holds while it starts the gateway."""
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
        """Return the claims of all installations on this machine to link numbers, and thereby to addresses."""
        return Claims("links", self.directory)

    def log(self, sandbox_id: str) -> Path:
        return self.members / f"{sandbox_id}.log"

    def authority(self, sandbox_id: str) -> Path:
        """Return the file with the certificate authority of a sandbox and its key. It outlives the gateway."""
        return self.directory.parent / "authorities" / sandbox_id

    def member(self, sandbox_id: str) -> Path:
        """Return the file with the gateway's record of a sandbox that has a link."""
        return self.members / f"{sandbox_id}.json"

    def is_member(self, sandbox_id: str) -> bool:
        return self.member(sandbox_id).exists()

    def is_router_there(self) -> bool:
        try:
            return os.stat(self.router).st_dev == os.stat("/proc/self/ns/net").st_dev
        except FileNotFoundError:
            return False

    def forget_members(self) -> None:
        """Remove the records and logs of the members of a router that is gone, as after a restart of the machine."""
        for path in self.members.glob("*"):
            path.unlink(missing_ok=True)
