"""Host side of the agent protocol: commands, files, trees and ports of one sandbox over one byte stream.

Knows no engine: all it needs is a function that gives a connected socket to the agent. Nothing that comes from inside
is trusted.
"""

from atoll.guest.channel import Channel
from atoll.guest.dial import Connect
from atoll.guest.files import FileEvent, FileEventKind, FileInfo, Files, Watch
from atoll.guest.guest import AgentStats, Guest, Hello
from atoll.guest.ports import Ports, PortStream
from atoll.guest.processes import (
    Capture,
    Completed,
    Output,
    Processes,
    ProcessExit,
    ProcessInfo,
    ProcessStream,
    StartRequest,
)

__all__ = [
    "AgentStats",
    "Capture",
    "Channel",
    "Completed",
    "Connect",
    "FileEvent",
    "FileEventKind",
    "FileInfo",
    "Files",
    "Guest",
    "Hello",
    "Output",
    "PortStream",
    "Ports",
    "ProcessExit",
    "ProcessInfo",
    "ProcessStream",
    "Processes",
    "StartRequest",
    "Watch",
]
