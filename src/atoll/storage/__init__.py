"""The writable layers of sandboxes, one for each, with a quota if the file system supports one, and named volumes."""

from atoll.storage.btrfs_layers import BtrfsLayers, open_layers
from atoll.storage.layers import Layer, Layers, PlainLayers
from atoll.storage.volume_rules import VolumeRecord
from atoll.storage.volumes import Volumes

__all__ = ["BtrfsLayers", "Layer", "Layers", "PlainLayers", "VolumeRecord", "Volumes", "open_layers"]
