"""The link between a container and the gateway.

The Docker engine creates the container with no network but loopback. Atoll then puts the link into its network
namespace from outside, before anything can run in it. That requires that the container's processes are visible on this
machine, and that they have a network namespace of their own in the host's kernel. The gateway records the latest
policy, because a container's labels cannot be changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from atoll import workers
from atoll.engines.docker.api import facts
from atoll.engines.docker.api.http import Http
from atoll.engines.docker.connect.agent_streams import Target, is_in
from atoll.errors import SandboxGoneError, UnsupportedError
from atoll.model import SandboxSpec
from atoll.model.network_policy import NetworkPolicy, opens_tls
from atoll.network import client
from atoll.network.authority import trusted
from atoll.network.client import Gateway
from atoll.network.refusals import Refusal
from atoll.settings import Settings


class ContainerLinks:
    def __init__(self, settings: Settings, http: Http) -> None:
        self._gateway = Gateway(settings)
        self._http = http
        self._settings = settings

    def problem(self, known: facts.Facts) -> str | None:
        """Return why no container of this Docker engine can have a link; None if containers can."""
        if not self._http.endpoint.may_be_local or not os.path.isdir(known.root_dir):
            return "the Docker engine is not on this machine"
        if facts.has_own_kernel(known.default_runtime):
            return _OTHER_KERNEL.format(known.default_runtime)
        return client.problem()

    def check(self, spec: SandboxSpec, known: facts.Facts) -> None:
        """Raise UnsupportedError for a policy that cannot be enforced under the OCI runtime of this spec."""
        if spec.network == "none":
            return
        if (reason := self.problem(known)) is not None:
            raise _refused(reason)
        if facts.has_own_kernel(runtime := known.runtime(spec)):
            raise _refused(_OTHER_KERNEL.format(runtime))

    def trusted(self, sandbox_id: str, policy: NetworkPolicy) -> Path | None:
        """Write a file with the certificates that the sandbox's container has to trust. None: those of its image are
        enough."""
        if not opens_tls(policy):
            return None
        path = self._trusted(sandbox_id)
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        path.write_bytes(trusted(self._gateway.authority(sandbox_id)))
        path.chmod(0o644)
        return path

    def _trusted(self, sandbox_id: str) -> Path:
        return self._settings.data_dir / "trusted" / sandbox_id

    async def attach(self, sandbox_id: str, target: Target, policy: NetworkPolicy) -> None:
        await workers.run(workers.ENGINE, self._attach, sandbox_id, target, policy)

    def _attach(self, sandbox_id: str, target: Target, policy: NetworkPolicy) -> None:
        if facts.has_own_kernel(target.runtime):
            raise _refused(_OTHER_KERNEL.format(target.runtime))
        try:
            fd = os.open(f"/proc/{target.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            raise SandboxGoneError("the sandbox ended while it was being connected") from None
        try:
            try:
                # Only now that the descriptor is open is it certain whose network namespace it is.
                mine = is_in(target.pid, target.container_id)
            except OSError:
                mine = False
            if not mine or os.fstat(fd).st_ino == os.stat("/proc/self/ns/net").st_ino:
                raise _refused("its containers' processes cannot be seen from here")
            self._gateway.attach(sandbox_id, policy, fd)
        finally:
            os.close(fd)

    async def change(self, sandbox_id: str, policy: NetworkPolicy) -> bool:
        """Change the policy of a link. Returns False if the sandbox has none."""
        self._gateway.need_authority(sandbox_id, policy)
        return await workers.run(workers.ENGINE, self._gateway.change, sandbox_id, policy)

    def may_be_linked(self, sandbox_id: str, policy: NetworkPolicy) -> bool:
        return policy != "none" or self._gateway.files.is_member(sandbox_id)

    async def renew(self, sandbox_id: str, target: Target, policy: NetworkPolicy) -> None:
        """Make sure that the gateway runs and that the link leads to the sandbox's current container.

        To be called before the sandbox is used. `policy` applies if the gateway does not know the sandbox.
        """
        if self.may_be_linked(sandbox_id, policy):
            await workers.run(workers.ENGINE, self._renew, sandbox_id, target, policy)

    def _renew(self, sandbox_id: str, target: Target, policy: NetworkPolicy) -> None:
        known = self._gateway.record(sandbox_id)
        try:
            links = Path(f"/proc/{target.pid}/net/dev").read_text()
        except OSError:
            raise SandboxGoneError("the sandbox ended while it was being connected") from None
        if known is None or f"{client.LINK}:" not in links:  # a new namespace may have the number of one that is gone
            self._attach(sandbox_id, target, policy if known is None else known.policy)
        else:
            self._gateway.ensure()

    async def refusals(self, sandbox_id: str) -> Sequence[Refusal]:
        return await workers.run(workers.ENGINE, self._gateway.refusals, sandbox_id)

    async def remove(self, sandbox_id: str) -> None:
        """Remove the link and what was recorded about it. May be repeated."""
        await workers.run(workers.ENGINE, self._remove, sandbox_id)

    def _remove(self, sandbox_id: str) -> None:
        self._gateway.detach(sandbox_id)
        self._gateway.forget(sandbox_id)
        self._trusted(sandbox_id).unlink(missing_ok=True)

    def now(self, sandbox_id: str, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with the policy that is in force now."""
        policy = self._gateway.policy(sandbox_id)
        return spec if policy is None else spec.model_copy(update={"network": policy})


_OTHER_KERNEL = "{} reads a sandbox's links when it starts, and Docker starts it before there can be one"


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"engine 'docker' cannot enforce network policies here: {reason}",
        hint="Use network='none', or the engine 'native' or 'oci' on the sandbox's own machine.",
    )
