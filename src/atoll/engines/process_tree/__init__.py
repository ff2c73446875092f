"""What the engines share that start sandboxes as processes of this machine: records, sockets, killing, removing."""

from atoll.engines.host.environment import clean_environment
from atoll.engines.process_tree.launch import Launch
from atoll.engines.process_tree.process_record import Record
from atoll.engines.process_tree.process_tree_engine import ProcessTreeEngine

__all__ = ["Launch", "ProcessTreeEngine", "Record", "clean_environment"]
