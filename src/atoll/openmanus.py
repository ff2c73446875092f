"""The public name of `atoll.compat.openmanus`."""

from atoll.compat.openmanus import *  # noqa: F403
from atoll.compat.openmanus import __all__ as __all__
