"""The writable layers of sandboxes, one for each, with a quota if the file system supports one."""

from atoll.storage.btrfs_layers import BtrfsLayers, open_layers
from atoll.storage.layers import Layer, Layers, PlainLayers

__all__ = ["BtrfsLayers", "Layer", "Layers", "PlainLayers", "open_layers"]
