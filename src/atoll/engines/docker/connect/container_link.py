"""The link of a container to the gateway. The engine makes it with no network but loopback; the link is put into its
network namespace from outside, before anybody can run anything in it.

That needs a container whose processes are this machine's own, in a network namespace of its own that its kernel is
ours of. What was last decided is written down by the gateway: a container's labels cannot be changed.
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
        """Why no container of this engine can have one."""
        if not self._http.endpoint.may_be_local or not os.path.isdir(known.root_dir):
            return "the Docker engine is not on this machine"
        if facts.has_own_kernel(known.default_runtime):
            return _OTHER_KERNEL.format(known.default_runtime)
        return client.problem()

    def check(self, spec: SandboxSpec, known: facts.Facts) -> None:
        """Raises UnsupportedError for a policy that cannot be enforced under the runtime of this spec."""
        if spec.network == "none":
            return
        if (reason := self.problem(known)) is not None:
            raise _refused(reason)
        if facts.has_own_kernel(runtime := known.runtime(spec)):
            raise _refused(_OTHER_KERNEL.format(runtime))

    def trusted(self, sandbox_id: str, policy: NetworkPolicy) -> Path | None:
        """A file with the certificates that a container of this name has to trust. None: whatever its image does."""
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
                # Only now is it certain whose network that is.
                mine = is_in(target.pid, target.container_id)
            except OSError:
                mine = False
            if not mine or os.fstat(fd).st_ino == os.stat("/proc/self/ns/net").st_ino:
                raise _refused("its containers' processes cannot be seen from here")
            self._gateway.attach(sandbox_id, policy, fd)
        finally:
            os.close(fd)

    async def change(self, sandbox_id: str, policy: NetworkPolicy) -> bool:
        """False: it has no link."""
        self._gateway.need_authority(sandbox_id, policy)
        return await workers.run(workers.ENGINE, self._gateway.change, sandbox_id, policy)

    def may_be_linked(self, sandbox_id: str, policy: NetworkPolicy) -> bool:
        return policy != "none" or self._gateway.files.is_member(sandbox_id)

    async def renew(self, sandbox_id: str, target: Target, policy: NetworkPolicy) -> None:
        """Before anybody uses it: the gateway runs, and its link leads to the container that it is now. `policy` is for
        one that the gateway does not know."""
        if self.may_be_linked(sandbox_id, policy):
            await workers.run(workers.ENGINE, self._renew, sandbox_id, target, policy)

    def _renew(self, sandbox_id: str, target: Target, policy: NetworkPolicy) -> None:
        known = self._gateway.record(sandbox_id)
        try:
            links = Path(f"/proc/{target.pid}/net/dev").read_text()
        except OSError:
            raise SandboxGoneError("the sandbox ended while it was being connected") from None
        if known is None or f"{client.LINK}:" not in links:  # a namespace that is gone gives its number to the next
            self._attach(sandbox_id, target, policy if known is None else known.policy)
        else:
            self._gateway.ensure()

    async def refusals(self, sandbox_id: str) -> Sequence[Refusal]:
        return await workers.run(workers.ENGINE, self._gateway.refusals, sandbox_id)

    async def remove(self, sandbox_id: str) -> None:
        """May be repeated."""
        await workers.run(workers.ENGINE, self._remove, sandbox_id)

    def _remove(self, sandbox_id: str) -> None:
        self._gateway.detach(sandbox_id)
        self._gateway.forget(sandbox_id)
        self._trusted(sandbox_id).unlink(missing_ok=True)

    def now(self, sandbox_id: str, spec: SandboxSpec) -> SandboxSpec:
        """The spec with the policy that holds now."""
        policy = self._gateway.policy(sandbox_id)
        return spec if policy is None else spec.model_copy(update={"network": policy})


_OTHER_KERNEL = "{} reads a sandbox's links when it starts, and Docker starts it before there can be one"


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"engine 'docker' cannot enforce network policies here: {reason}",
        hint="Use network='none', or the engine 'native' or 'oci' on the sandbox's own machine.",
    )
