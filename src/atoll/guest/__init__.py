"""Host side of the agent protocol: commands, files, trees and ports of one sandbox over one byte stream.

This package does not depend on engines: it needs only a function that returns a socket connected to the agent. Nothing
that comes from inside the sandbox is trusted.
"""

from atoll.guest.connection import Connect, Connection
from atoll.guest.files import FileEvent, FileEventKind, FileInfo, Files, Watch
from atoll.guest.guest import AgentStats, Guest, Hello
from atoll.guest.port_streams import Ports, PortStream
from atoll.guest.processes import (
    Capture,
    CompletedProcess,
    FollowedProcess,
    OutputPiece,
    Processes,
    ProcessExit,
    ProcessInfo,
    StartRequest,
)

__all__ = [
    "AgentStats",
    "Capture",
    "CompletedProcess",
    "Connect",
    "Connection",
    "FileEvent",
    "FileEventKind",
    "FileInfo",
    "Files",
    "FollowedProcess",
    "Guest",
    "Hello",
    "OutputPiece",
    "PortStream",
    "Ports",
    "ProcessExit",
    "ProcessInfo",
    "Processes",
    "StartRequest",
    "Watch",
]
