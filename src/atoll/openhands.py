"""The public name of `atoll.compat.openhands`."""

from atoll.compat.openhands import *  # noqa: F403
from atoll.compat.openhands import __all__ as __all__
