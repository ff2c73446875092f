"""The `atoll` command for tests that call it many times: its modules are imported once, and every call is a fork.

    forked_atoll.py serve SOCKET               import everything and wait for calls
    forked_atoll.py call SOCKET ARGUMENTS…     do what `atoll ARGUMENTS…` does, with the same descriptors and variables

Most of a call of the real command is Python's start, about half a second on a busy machine.
"""

from __future__ import annotations

import json
import os
import socket
import sys

_MAX_BYTES = 1 << 20
_STDIO = 3


def call(path: str, arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(path)
        told = json.dumps({"argv": ["atoll", *arguments], "cwd": os.getcwd(), "environ": dict(os.environ)})
        socket.send_fds(line, [told.encode()], list(range(_STDIO)))
        return int(line.recv(16) or 255)


def serve(path: str) -> None:
    from importlib import import_module

    from atoll import cli
    from atoll.engines import registry
    from atoll.settings import Settings

    for _, target, _ in cli.COMMANDS:
        import_module(target.partition(":")[0])
    for engine in (*registry.names(), "remote"):
        registry.probe(engine, Settings.load())  # imports its module
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(path)
        door.listen()
        print("ready", flush=True)
        while True:
            line, _ = door.accept()
            if _is_child():
                door.close()
                _answer(line)
                return
            line.close()
            while _reaped():
                pass


def _answer(line: socket.socket) -> None:
    """Run the command in a child, and report its exit code. Both return from `serve`."""
    told, descriptors, _, _ = socket.recv_fds(line, _MAX_BYTES, _STDIO)
    if not _is_child():
        _, status = os.wait()
        line.send(str(os.waitstatus_to_exitcode(status) % 256).encode())
        os._exit(0)
    line.close()
    wanted = json.loads(told)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["environ"])
    sys.argv = wanted["argv"]

    from atoll.cli import main

    main()


def _is_child() -> bool:
    return os.fork() == 0


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[2], sys.argv[3:]))
