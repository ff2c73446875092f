"""The network of a sandbox: what it may reach, and how its ports are reached."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from atoll.engines.contract import NetworkPolicies, PortExposing, supporting
from atoll.errors import UnsupportedError
from atoll.guest.port_streams import PortStream
from atoll.guest.socket_tables import ListeningPort, listening_ports
from atoll.model import SandboxSpec
from atoll.model.network_policy import NetworkRules
from atoll.network.refusals import Refusal
from atoll.sandbox.port_forward import AsyncForward
from atoll.sandbox.sandbox_access import SandboxAccess


class NetworkMethods:
    """What `AsyncSandbox` can do with its network and ports."""

    access: SandboxAccess

    async def set_network(self, policy: str | Mapping[str, object] | NetworkRules) -> None:
        """What it may reach from now on: `none`, `all`, or rules as for `network`. Ends what the policy forbids."""
        wanted = SandboxSpec.of(network=dict(policy) if isinstance(policy, Mapping) else policy).network
        await (await self._network_policies()).set_network(self.access.handle(), wanted)
        self.access.has_network(wanted)

    async def network_log(self) -> list[Refusal]:
        """What was refused, oldest first: when, where to, under which name, and by which rule."""
        return list(await (await self._network_policies()).refusals(self.access.handle()))

    async def open_connections(self) -> list[str]:
        """The far ends, as ADDRESS:PORT, of the TCP connections that it has to the outside. No saved memory keeps
        them."""
        return await self.access.open_connections()

    async def ports(self) -> list[ListeningPort]:
        """The TCP ports that something in the sandbox listens on, with its process, sorted by port."""
        self.access.handle()
        return await listening_ports(self.access.guest)

    async def port_link(self, port: int, *, lifetime: float = 3600) -> str:
        """A URL that leads to a port inside for so many seconds, for whoever has it. Only with a server: without one
        `expose` gives a port of this machine."""
        engine, handle = await self.access.engine(), self.access.handle()
        if not isinstance(engine, PortExposing):
            raise UnsupportedError("links to ports need a server", hint="`expose` gives a port of this machine.")
        return await engine.port_link(handle, port, lifetime)

    async def expose(self, port: int, local_port: int = 0, *, host: str = "127.0.0.1") -> AsyncForward:
        """Let a port of this machine (0: any free one) lead to a port inside, also with the network off."""
        self.access.handle()
        forward = AsyncForward(functools.partial(self.connect_port, port), port)
        return await forward.listen(local_port, host)

    async def connect_port(self, port: int) -> PortStream:
        """A stream to a TCP port that something in the sandbox listens on; works with the network off."""
        self.access.handle()
        return await self.access.guest.ports.connect(port=port)

    async def connect_socket(self, path: str) -> PortStream:
        """A stream to a unix socket in the sandbox."""
        self.access.handle()
        return await self.access.guest.ports.connect(path=self.access.path(path))

    async def _network_policies(self) -> NetworkPolicies:
        engine = await self.access.engine()
        enforcer = await supporting(engine, NetworkPolicies)
        if enforcer is not None:
            return enforcer
        raise UnsupportedError(f"engine '{engine.name}' cannot enforce network policies here")
