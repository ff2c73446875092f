"""The paths, control groups and other parts of sandboxes, all found by the sandbox id."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from pathlib import Path

from atoll import agent_binary, durable
from atoll.archive import tree
from atoll.claims import Claims
from atoll.engines.host.cgroups.account_groups import AccountGroups
from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.engines.host.cgroups.group_lock import GroupLock
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.host.exclusion import Exclusion
from atoll.engines.linux.linux_record import Record, Records
from atoll.engines.linux.plan.id_ranges import IdRanges
from atoll.engines.linux.plan.sandbox_plan import Bind, Root
from atoll.errors import EngineUnavailableError
from atoll.images import Images
from atoll.model import Capability, SandboxSpec
from atoll.model.network_policy import opens_tls
from atoll.network import client as network
from atoll.network.authority import BUNDLE, VARIABLES, trusted
from atoll.network.client import RESOLV_CONF, Gateway
from atoll.settings import Settings
from atoll.storage import Layers, Volumes, open_layers

STARTING = ".starting-"
_BY_CONTROLLER = {
    "memory": Capability.MEMORY,
    "cpu": Capability.CPUS,
    "pids": Capability.PIDS,
    "freezer": Capability.PAUSE,
}
_STAGES = ("/mnt", "/media", "/srv", "/opt", "/home")


class SandboxLayout:
    def __init__(self, settings: Settings, hierarchy: Hierarchy, layers: Layers | None = None) -> None:
        self.settings = settings
        self.hierarchy = hierarchy
        self.data = settings.data_dir / "oci"
        self.records = Records(self.data / "sandboxes")
        self.exclusion = Exclusion(self.records.home)
        self.group_lock = GroupLock.of(settings)
        self.ids = IdRanges(self.data / "ids", self._claims("ids"))
        self.layers: Layers = layers or open_layers(settings.data_dir)
        self.volumes = Volumes(settings.data_dir, settings.resources.volumes, self.records.exists)
        self.images = Images(
            settings.data_dir,
            settings=settings,
            registry_mirrors=settings.registry_mirrors,
            blob_cache_bytes=settings.blob_cache_bytes,
        )
        self.gateway = Gateway(settings)
        self._groups: dict[str, str] = {}
        """A cache of the control group paths of sandboxes, by sandbox id."""

    def capabilities(self) -> frozenset[Capability]:
        """Return what can be enforced and offered on this machine."""
        found = {
            Capability.OPEN_FILES,
            Capability.SHM,
            Capability.VOLUMES,
            Capability.IMAGES,
            Capability.USERS,
            Capability.ISOLATION,
        }
        controllers = self.hierarchy.controllers if self.hierarchy.writable() else {}
        found |= {capability for controller, capability in _BY_CONTROLLER.items() if controller in controllers}
        if network.problem() is None:
            found.add(Capability.NETWORK)
        if self.layers.enforces_disk:
            found |= {Capability.DISK, Capability.NAMED_VOLUMES}
        if self.layers.can_save:
            found |= {Capability.CHECKPOINTS, Capability.SAVED_MEMORY}
        return frozenset(found)

    @functools.cached_property
    def slice(self) -> str:
        """The control group that is the parent of all others of this installation.

        It is named after the installation, so those of other installations are never touched. Raises
        EngineUnavailableError if the data directory is a copy of another one that is in use.
        """
        name = f"atoll-{self.settings.installation_id()[:12]}"
        claims = self._claims("groups")
        other = claims.take_over(name, "groups") if claims is not None else None
        if other is not None:
            raise EngineUnavailableError(
                f"'{self.settings.data_dir}' is a copy of '{other.home}', which is in use on this machine",
                hint=f"Remove '{self.settings.data_dir}/installation-id', and the sandboxes that were copied with it.",
            )
        return f"/{name}"

    def collect_claims(self) -> list[str]:
        """Release unused claims of installations that are gone from this machine. Return what was released."""
        found = [f"ids from {first}" for first in self.ids.collect()]
        claims = self._claims("groups")
        if claims is not None:
            mounts = set(self.hierarchy.controllers.values())
            claims.collect(lambda name: any((mount / name).exists() for mount in mounts))
        return found

    def _claims(self, kind: str) -> Claims | None:
        """Return the claims on this machine, or None for an ordinary user, whose ids and groups are given to no other
        user of the machine."""
        return Claims(kind, self.settings.data_dir) if os.geteuid() == 0 else None

    @functools.cached_property
    def accounts(self) -> AccountGroups:
        return AccountGroups(self.hierarchy, self.slice, self.settings.resources)

    def group(self, sandbox_id: str) -> Group:
        known = self._groups.get(sandbox_id)
        # This is called around every command, so one `isdir` has to be enough to check the cached path.
        mount = next(iter(self.hierarchy.controllers.values()), None)
        if known is not None and (mount is None or os.path.isdir(f"{mount}{known}")):
            return Group(self.hierarchy, known)
        return self._look_for_group(sandbox_id)

    def make_group(self, record: Record, limits: CgroupLimits, *, virtual: bool = False) -> Group:
        """Make the control group of a sandbox. Raises OSError if a limit cannot be set."""
        if record.account is None:
            group = Group(self.hierarchy, f"{self.slice}/{record.sandbox_id}")
            group.create(limits)
        else:
            group = self.accounts.make(record.account, record.sandbox_id, limits, virtual=virtual)
        self._groups[record.sandbox_id] = group.path
        return group

    def forget_group(self, sandbox_id: str) -> None:
        self._groups.pop(sandbox_id, None)

    def _look_for_group(self, sandbox_id: str) -> Group:
        record = self.records.read(sandbox_id)
        if record is None:
            path = self.accounts.find(sandbox_id)
        elif record.account is not None:
            path = self._groups[sandbox_id] = f"{self.accounts.path(record.account)}/{sandbox_id}"
        else:
            path = None
        return Group(self.hierarchy, path or f"{self.slice}/{sandbox_id}")

    def starting(self, sandbox_id: str) -> Group:
        """Return the control group in which an OCI runtime itself runs while it makes the sandbox, so that none of its
        processes can get lost."""
        controllers = {name: path for name, path in self.hierarchy.controllers.items() if name == "freezer"}
        return Group(Hierarchy(self.hierarchy.mode, controllers), f"{self.slice}/{STARTING}{sandbox_id}")

    def run(self, sandbox_id: str) -> Path:
        """Return the run directory of a sandbox, with its sockets, its bundle and the OCI runtime's state. It does not
        survive a restart of the machine."""
        return self.settings.run_dir / "oci" / sandbox_id

    def make_run(self, sandbox_id: str) -> Path:
        self.settings.socket_path("oci", f"{sandbox_id}/s")
        path = self.settings.engine_run_dir("oci") / sandbox_id
        path.mkdir(mode=0o700)
        return path

    def socket(self, sandbox_id: str) -> Path:
        return self.run(sandbox_id) / "s"

    def stage(self, *needed: Path) -> Path:
        """Return a directory of the host on which each sandbox mounts its stage, in its own mount namespace.

        Every user must be able to reach it, because the sandbox's root, an ordinary user on the host, has to. It must
        not cover what the OCI runtime needs: the programs in `needed` and Atoll's directories. Raises
        EngineUnavailableError if there is none.
        """
        used = (self.settings.data_dir, self.settings.run_dir, self.mounter(), *needed)
        for name in _STAGES:
            path = Path(name)
            if (
                path.is_dir()
                and not path.is_symlink()
                and path.stat().st_mode & 0o001
                and not any(path in each.parents for each in used)
            ):
                return path
        raise EngineUnavailableError(f"none of {', '.join(_STAGES)} can be mounted on")

    def memory(self, saved_id: str) -> Path:
        """Return the directory for the memory of a saved state, whether or not it has any."""
        return self.data / "memory" / saved_id

    def top(self, inner: str) -> Path:
        """Return a lower layer that adds the `dev` and `proc` that OCI runtimes expect to an overlay's top directory.
        It is made if it is missing."""
        path = self.data / "tops" / inner
        if not (path / "proc").is_symlink():
            (path / "dev").mkdir(mode=0o755, parents=True, exist_ok=True)
            (path / "proc").symlink_to(f"{inner}/proc")
        return path

    @property
    def programs(self) -> Path:
        """The directory with copies of Atoll's programs that run in sandboxes, one copy for each version."""
        return self.data / "programs"

    def agent(self, mode: int = 0o711) -> Path:
        """Return a copy of the agent, made if it is missing. By default the sandbox can run but not read it, so that no
        process inside can trace it."""
        source = agent_binary.path()
        info = source.stat()
        key = hashlib.sha256(f"{source} {info.st_mtime_ns} {info.st_size}".encode()).hexdigest()[:16]
        return self._program(source, f"atoll-agent-{key}-{mode:o}", mode)

    def mounter(self) -> Path:
        path = agent_binary.path().with_name("atoll-mount")
        if not os.access(path, os.X_OK):
            raise EngineUnavailableError(f"there is no program at '{path}'", hint="In a working copy run 'make agent'.")
        return path

    def network_files(self, sandbox_id: str, spec: SandboxSpec, root: Root) -> tuple[Bind, ...]:
        """Return mounts of the files that name the resolver and the trusted certificates.

        The `host` image needs no file for the resolver, because it has one. Other images get one even without a
        network, because the sandbox may be connected later.
        """
        found = [self._resolver_file()] if root.usr is None and network.problem() is None else []
        if opens_tls(spec.network):
            found.append(self._trusted_file(sandbox_id))
        return tuple(found)

    def network_variables(self, spec: SandboxSpec) -> dict[str, str]:
        return VARIABLES if opens_tls(spec.network) else {}

    def forget_network(self, sandbox_id: str) -> None:
        self.gateway.forget(sandbox_id)
        self._trusted(sandbox_id).unlink(missing_ok=True)

    def _trusted(self, sandbox_id: str) -> Path:
        return self.data / "trusted" / sandbox_id

    def _trusted_file(self, sandbox_id: str) -> Bind:
        path = self._trusted(sandbox_id)
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        durable.write(path, trusted(self.gateway.authority(sandbox_id)), 0o644)
        return Bind(str(path), BUNDLE, ("ro", "nosuid", "nodev", "noexec"))

    def _resolver_file(self) -> Bind:
        path = self.data / "resolv.conf"
        if not path.exists():
            durable.write(path, RESOLV_CONF, 0o644)
        return Bind(str(path), "/etc/resolv.conf", ("ro", "nosuid", "nodev", "noexec"))

    def sweep(self) -> None:
        """Remove drafts of files whose writer died."""
        self.records.sweep()
        self.layers.sweep()
        self.volumes.sweep()
        for name in ("host", "host-copies", "programs", "trusted"):
            durable.remove_abandoned(self.data / name, tree.remove)

    def close(self) -> None:
        """Release what sandboxes share, as far as no sandbox uses it any more."""
        self.layers.close()
        self.remove_empty_groups()

    def remove_empty_groups(self) -> None:
        """Remove the control groups of accounts without sandboxes, unless a sandbox is being made right now."""
        with self.group_lock.unclaimed() as nobody:
            if nobody:
                self.accounts.remove_empty()

    def _program(self, source: Path, name: str, mode: int) -> Path:
        directory = self.programs
        path = directory / name
        if not path.exists():
            directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            with durable.draft(path) as draft:
                shutil.copyfile(source, draft)
                draft.chmod(mode)
        return path
