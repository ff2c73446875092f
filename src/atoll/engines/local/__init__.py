"""What the engines share that start sandboxes as processes of this machine: records, sockets, killing, removing."""

from atoll.engines.local.engine import LocalEngine
from atoll.engines.local.environment import clean_environment
from atoll.engines.local.launch import Launch
from atoll.engines.local.record import Record

__all__ = ["Launch", "LocalEngine", "Record", "clean_environment"]
