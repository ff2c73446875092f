"""Images: the root file systems that sandboxes start from, pulled, built or imported, and stored once by their content.

Archives and registries are not trusted. `Images` is the entry point; engines use the `root` of the `Image` it returns.
"""

from atoll.archive.archive_limits import ImageLimits
from atoll.archive.work import Progress, ProgressCallback
from atoll.images.image import Collected, Image, Pushed
from atoll.images.images import Images
from atoll.images.oci_documents import ImageConfig
from atoll.images.recipes import Recipe
from atoll.images.reference import Kind, Reference, parse
from atoll.images.usage import ImageUsage, Pruned

__all__ = [
    "Collected",
    "Image",
    "ImageConfig",
    "ImageLimits",
    "ImageUsage",
    "Images",
    "Kind",
    "Progress",
    "ProgressCallback",
    "Pruned",
    "Pushed",
    "Recipe",
    "Reference",
    "parse",
]
