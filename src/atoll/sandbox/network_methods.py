"""The network of a sandbox: its policy, and access to its ports."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from atoll.engines.contract import NetworkPolicies, PortExposing, supporting
from atoll.errors import UnsupportedError
from atoll.guest.port_streams import AsyncPortStream
from atoll.model import ListeningPort, SandboxSpec
from atoll.model.network_policy import NetworkRules
from atoll.network.refusals import Refusal
from atoll.sandbox.port_forward import AsyncForward
from atoll.sandbox.sandbox_access import SandboxAccess


class NetworkMethods:
    """The methods of `AsyncSandbox` for its network and ports."""

    access: SandboxAccess

    async def set_network(self, policy: str | Mapping[str, object] | NetworkRules) -> None:
        """Replace the network policy: `none`, `all`, or rules as for `network`.

        Open connections that the new policy forbids are closed.
        """
        wanted = SandboxSpec.of(network=dict(policy) if isinstance(policy, Mapping) else policy).network
        await (await self._network_policies()).set_network(self.access.handle(), wanted)
        self.access.has_network(wanted)

    async def network_log(self) -> list[Refusal]:
        """Return the refusals, oldest first: time, destination, host name, and the rule that refused."""
        return list(await (await self._network_policies()).refusals(self.access.handle()))

    async def open_connections(self) -> list[str]:
        """Return the remote ends, as ADDRESS:PORT, of the sandbox's TCP connections to the outside.

        Saved memory cannot include these connections.
        """
        return await self.access.open_connections()

    async def ports(self) -> list[ListeningPort]:
        """Return the TCP ports that processes in the sandbox listen on, with the process of each, sorted by port."""
        from atoll.guest.socket_tables import listening_ports

        self.access.handle()
        return await listening_ports(self.access.guest)

    async def port_link(self, port: int, *, lifetime: float = 3600) -> str:
        """Return a signed URL to a port in the sandbox, valid for `lifetime` seconds without other credentials.

        Needs a server; without one, use `expose`, which opens a port on this machine.
        """
        engine, handle = await self.access.engine(), self.access.handle()
        if not isinstance(engine, PortExposing):
            raise UnsupportedError("links to ports need a server", hint="`expose` gives a port of this machine.")
        return await engine.port_link(handle, port, lifetime)

    async def expose(self, port: int, local_port: int = 0, *, host: str = "127.0.0.1") -> AsyncForward:
        """Forward a local port (0: any free one) to a port in the sandbox. This works with the network off."""
        self.access.handle()
        forward = AsyncForward(functools.partial(self.connect_port, port), port)
        return await forward.listen(local_port, host)

    async def connect_port(self, port: int) -> AsyncPortStream:
        """Connect to a TCP port that a process in the sandbox listens on. This works with the network off."""
        self.access.handle()
        return await self.access.guest.ports.connect(port=port)

    async def connect_socket(self, path: str) -> AsyncPortStream:
        """Connect to a Unix socket in the sandbox."""
        self.access.handle()
        return await self.access.guest.ports.connect(path=self.access.path(path))

    async def _network_policies(self) -> NetworkPolicies:
        engine = await self.access.engine()
        enforcer = await supporting(engine, NetworkPolicies)
        if enforcer is not None:
            return enforcer
        raise UnsupportedError(f"engine '{engine.name}' cannot enforce network policies here")
