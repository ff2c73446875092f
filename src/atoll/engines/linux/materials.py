"""Prepares the file tree of a sandbox: its writable layer over its image, and host files. All launchers use it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.linux.host_image import host_copies, host_view
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.plan.sandbox_plan import HostFacts, IdRange, Plan, Root, make_plan
from atoll.engines.linux.states import identity
from atoll.engines.linux.states.step_names import STEP
from atoll.images import Image
from atoll.storage import Layer

_FRESH_S = 2.0
"""How long the host's /etc and the agent's file are assumed to be unchanged after they were checked."""


@dataclass(frozen=True, slots=True)
class Materials:
    root: Root
    env: dict[str, str]
    """The environment variables of the image and of the network."""
    agent: Path
    """The agent's file."""


class MaterialStore:
    """Caches what many sandboxes share, and checks it again every few seconds."""

    def __init__(self, layout: SandboxLayout) -> None:
        self._layout = layout
        self._looked_at = -_FRESH_S
        self._skeleton: Path
        self._agent: Path
        self._copies: dict[int, Path] = {}

    def take(self, record: Record, image: Image | None) -> Materials:
        """Make or open the sandbox's layer over its image. Blocks, because the file system of the layers may be
        busy."""
        self._look()
        if image is None or image.root is None:
            layer = _layer(self._layout, record, (self._skeleton / host_view.INNER,))
            copies = self._copies_for(record.account or "")
            root = Root((self._skeleton,), layer.path, host_view.INNER, host_view.USR, copies)
            env = {}
        else:
            layer = _layer(self._layout, record, image.layers)
            root = Root(tuple(each.parent for each in image.layers), layer.path, image.root.name)
            env = image.config.env
        return Materials(root, {**env, **self._layout.network_variables(record.spec)}, self._agent)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _FRESH_S and self._skeleton.is_dir():
            return
        self._skeleton = host_view.skeleton(self._layout.data / "host")
        self._copies.clear()
        self._agent = self._layout.agent()
        self._looked_at = now

    def _copies_for(self, account: str) -> Path:
        number = host_copies.number_of(account)
        if number not in self._copies:
            self._copies[number] = host_copies.copies(self._layout.data / "host-copies", number, host_view.USR)
        return self._copies[number]


def plan_for(
    layout: SandboxLayout, record: Record, materials: Materials, facts: HostFacts, ids: IdRange, argv: tuple[str, ...]
) -> Plan:
    """Return the plan of this sandbox, with the limits in force and the files that its network needs. Its named volumes
    are made if they are missing, and belong to its users from now on. Blocks."""
    spec = record.spec
    named = {
        volume.name: layout.volumes.use(spec.owner, volume.name, record.sandbox_id, read_only=volume.read_only)
        for volume in spec.named_volumes
    }
    files = layout.network_files(record.sandbox_id, record.spec, materials.root)
    return make_plan(
        record.limited_spec(),
        facts,
        materials.root,
        ids,
        sandbox_id=record.sandbox_id,
        argv=argv,
        env=materials.env,
        files=files,
        named=named,
    )


def _layer(layout: SandboxLayout, record: Record, below: tuple[Path, ...]) -> Layer:
    """Return the sandbox's writable layer over these roots, topmost first: a new one, or the existing one if it is
    started again."""
    if record.restoring is not None:
        layer = layout.layers.open_layer(record.sandbox_id)
    else:
        layer = layout.layers.create_layer(record.sandbox_id, record.layer_limit_bytes(), record.origin)
    if record.memory == record.sandbox_id:
        return layer  # it was only hibernated
    if record.spec.image.startswith(STEP):
        return layer  # the next step of a build sees exactly what the last one left
    if record.restoring not in (None, "") or record.origin is not None:
        own = record.restoring not in (None, record.origin)  # checkpoints of the sandbox itself have its identity
        identity.freshen(layer.path / "upper" / below[0].name, below, record.sandbox_id, own=own)
    return layer
