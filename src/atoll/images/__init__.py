"""Images: the root file systems that sandboxes start from, pulled, built or imported, and stored once by their content.

Everything here is written for archives and registries of strangers; `Images` is the way in, `Image.root` the way out.
"""

from atoll.images.facade import Images
from atoll.images.limits import ImageLimits
from atoll.images.oci import ImageConfig
from atoll.images.recipes import Recipe
from atoll.images.reference import Kind, Reference, parse
from atoll.images.store import Collected, Image
from atoll.images.work import Progress, ProgressCallback

__all__ = [
    "Collected",
    "Image",
    "ImageConfig",
    "ImageLimits",
    "Images",
    "Kind",
    "Progress",
    "ProgressCallback",
    "Recipe",
    "Reference",
    "parse",
]
