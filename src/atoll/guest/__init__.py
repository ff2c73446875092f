"""Host side of the agent protocol: commands, files, trees and ports of one sandbox over one byte stream.

This package does not depend on engines: it needs only a function that returns a socket connected to the agent. Nothing
that comes from inside the sandbox is trusted.
"""

from atoll.guest.connection import Connect, Connection
from atoll.guest.files import AsyncWatch, FileEvent, FileEventKind, FileInfo, Files
from atoll.guest.guest import AgentStats, Guest, Hello
from atoll.guest.port_streams import AsyncPortStream, Ports
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
    "AsyncPortStream",
    "AsyncWatch",
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
    "Ports",
    "ProcessExit",
    "ProcessInfo",
    "Processes",
    "StartRequest",
]
