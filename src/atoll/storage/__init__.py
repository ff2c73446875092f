"""Where the sandboxes' own files live: one writable layer for each, with a quota where the file system can keep one."""

from atoll.storage.btrfs_layers import BtrfsLayers, open_layers
from atoll.storage.layers import Layer, Layers, PlainLayers

__all__ = ["BtrfsLayers", "Layer", "Layers", "PlainLayers", "open_layers"]
