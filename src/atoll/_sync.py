"""The synchronous classes. Generated from the asynchronous ones by scripts/generate_sync.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from atoll.engines.contract import Engine
from atoll.guest.file_watch import FileEvent, Watch
from atoll.guest.files import FileInfo
from atoll.guest.port_streams import PortStream
from atoll.guest.socket_tables import ListeningPort
from atoll.model import ExecutionResult, Observation, SandboxDetails, SandboxSpec, Stats, manus_names
from atoll.model.checkpoint import Change, Checkpoint, Snapshot, Undo
from atoll.model.network_policy import NetworkRules
from atoll.network.refusals import Refusal
from atoll.sandbox.command import DEFAULT_OUTPUT_BYTES, AsyncCommand, Output
from atoll.sandbox.execution import CommandLine
from atoll.sandbox.export import Export
from atoll.sandbox.port_forward import AsyncForward
from atoll.sandbox.portal import Portal, portal
from atoll.sandbox.sandbox import DEFAULT_TIMEOUT_S, AsyncSandbox
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.terminal import AsyncTerminal
from atoll.settings import Settings


class Command:
    """A command of a sandbox, by its id. Iterate over it to get its output as it comes.

    The command belongs to the sandbox, not to this object: it goes on when the connection is lost or the program that
    started it dies, and its output is kept for whoever attaches next. Lost connections are made again without a gap.
    """

    def __init__(self, original: AsyncCommand, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def pid(self) -> int:
        """Its number inside the sandbox."""
        return self._async.pid

    @property
    def offsets(self) -> tuple[int, int]:
        """How far stdout and stderr were read: attach from here to go on."""
        return self._async.offsets

    @property
    def dropped_bytes(self) -> int:
        """How much of the output was no longer kept when this object attached to it."""
        return self._async.dropped_bytes

    @property
    def ended(self) -> bool:
        """Whether this object has read the output to its end."""
        return self._async.ended

    def __iter__(self) -> Iterator[Output]:
        """The output, piece by piece, until the command ends."""
        return self._portal.iterate(self._async.__aiter__())

    def wait(self) -> ExecutionResult:
        """Wait for its end. The result holds the output that this object has read."""
        return self._portal.call(self._async.wait())

    def kill(self, signal: int = 9) -> None:
        """Send a signal. With 9 (the default) everything the command started dies too, and is gone on return."""
        self._portal.call(self._async.kill(signal))

    def send_stdin(self, data: str | bytes) -> None:
        """Write to its standard input (start it with `stdin=True`). BrokenPipeError once it has ended."""
        self._portal.call(self._async.send_stdin(data))

    def close_stdin(self) -> None:
        """Tell it that there is no more input."""
        self._portal.call(self._async.close_stdin())

    def detach(self) -> None:
        """Stop following it. It goes on; `attach` finds it again."""
        self._portal.call(self._async.detach())


class Terminal:
    """A program on a terminal. Iterate over it to read what the program writes; `write` types."""

    def __init__(self, original: AsyncTerminal, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    @property
    def id(self) -> str:
        return self._async.id

    def __iter__(self) -> Iterator[bytes]:
        """Yield what the program writes to the terminal, until it ends."""
        return self._portal.iterate(self._async.__aiter__())

    def write(self, data: str | bytes) -> None:
        """Type this. Control characters act as on a keyboard: `\x03` is Ctrl-C."""
        self._portal.call(self._async.write(data))

    def resize(self, rows: int, columns: int) -> None:
        """Tell the program that the window has changed."""
        self._portal.call(self._async.resize(rows, columns))

    def wait(self) -> int:
        """Wait until the program ends, and return its exit code."""
        return self._portal.call(self._async.wait())

    def kill(self) -> None:
        """End the program and everything it started."""
        self._portal.call(self._async.kill())


class Shell:
    """A named persistent shell of a sandbox. Concurrent callers take turns; a shell that ended is started again."""

    def __init__(self, original: AsyncShell, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    @property
    def name(self) -> str:
        return self._async.name

    def run(self, command: str, timeout: float) -> ExecutionResult:
        """Type one command: its output, both streams in order, and exit code. A timeout is a result, as with `exec`."""
        return self._portal.call(self._async.run(command, timeout))

    def close(self) -> None:
        """End the shell and what it started. The next command starts a new one."""
        self._portal.call(self._async.close())


class FileWatch:
    """`with files.watch(path) as events: for event in events: ...`. Runs until it is left or closed."""

    def __init__(self, original: Watch, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    def __enter__(self) -> Self:
        """Changes made after this are seen."""
        self._portal.call(self._async.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._portal.call(self._async.__aexit__(*_))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FileEvent:
        try:
            return self._portal.call(self._async.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """May be repeated. An iteration that waits ends."""
        self._portal.call(self._async.aclose())


class Port:
    """A connected stream of bytes. Reading and writing may go on at the same time."""

    def __init__(self, original: PortStream, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    def read(self, n: int = 65536) -> bytes:
        """At most `n` bytes, as soon as there are any; b"" at the end."""
        return self._portal.call(self._async.read(n))

    def write(self, data: bytes) -> None:
        self._portal.call(self._async.write(data))

    def write_eof(self) -> None:
        """Nothing more will be written; reading goes on."""
        self._portal.call(self._async.write_eof())

    def close(self) -> None:
        """May be repeated."""
        self._portal.call(self._async.aclose())

    def __enter__(self) -> Self:
        self._portal.call(self._async.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._portal.call(self._async.__aexit__(*_))


class Forward:
    """Open until `aclose`, or as long as an `with` of it. What opens later inside works at once."""

    def __init__(self, original: AsyncForward, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    @property
    def port(self) -> int:
        return self._async.port

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens on this machine."""
        return self._async.address

    @property
    def url(self) -> str:
        """For a browser, if what listens inside speaks HTTP."""
        return self._async.url

    def close(self) -> None:
        """Close it and every connection through it. May be repeated."""
        self._portal.call(self._async.aclose())

    def __enter__(self) -> Self:
        self._portal.call(self._async.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._async.__aexit__(kind, error, trace))


class Sandbox:
    """An isolated Linux environment. Use it as an async context manager, or call `create` and `cleanup`.

    `exec` runs one process and returns its result; `run_command` types into a shell that remembers. A command that
    fails is a result; an exception means that the sandbox itself failed. Relative paths start at the work directory.

    With `server` (or ATOLL_URL) the sandbox is one of that server, everything else stays the same. Each of the named
    `ports` is a variable inside, `NAME=PORT`, and exposed by the server.
    """

    def __init__(
        self,
        spec: SandboxSpec | Mapping[str, object] | None = None,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        image: str | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: str | int | None = None,
        env: Mapping[str, str] | None = None,
        volumes: Mapping[str, str] | Sequence[str] | None = None,
        work_dir: str | None = None,
        network: str | Mapping[str, object] | NetworkRules | None = None,
        isolation: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        lifetime: float | None = None,
        setup: Sequence[str] | None = None,
        setup_timeout: float | None = None,
        task_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
        undo: bool | Undo = False,
        settings: Settings | None = None,
        **names: Unpack[manus_names.SandboxNames],
    ) -> None:
        """`spec` may be an object as in a request to a server, or as the Manus example has it: there `timeout` is how
        long the sandbox may live. As a keyword `timeout` is how long a command may take, and `lifetime` how long the
        sandbox may live. `setup` are command lines that run before `create` returns."""
        self._async = AsyncSandbox(
            spec,
            engine=engine,
            server=server,
            api_key=api_key,
            image=image,
            memory=memory,
            cpus=cpus,
            pids=pids,
            disk=disk,
            env=env,
            volumes=volumes,
            work_dir=work_dir,
            network=network,
            isolation=isolation,
            timeout=timeout,
            lifetime=lifetime,
            setup=setup,
            setup_timeout=setup_timeout,
            task_id=task_id,
            labels=labels,
            ports=ports,
            undo=undo,
            settings=settings,
            **names,
        )
        self._portal = portal()

    def _twin(self, original: AsyncSandbox) -> Self:
        twin = type(self).__new__(type(self))
        twin._async, twin._portal = original, self._portal
        return twin

    @property
    def timeout_s(self) -> float:
        return self._async.timeout_s

    @property
    def id(self) -> str:
        """The sandbox's id, by which `attach` finds it."""
        return self._async.id

    @property
    def spec(self) -> SandboxSpec:
        """What the sandbox should be."""
        return self._async.spec

    @property
    def engine_name(self) -> str:
        """The engine it runs on."""
        return self._async.engine_name

    def create(self) -> Self:
        """Make the sandbox and wait until it answers. If that fails nothing is left behind."""
        self._portal.call(self._async.create())
        return self

    @classmethod
    def attach(
        cls,
        sandbox_id: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        settings: Settings | None = None,
    ) -> Self:
        """A sandbox that exists, also one that another process made. SandboxNotFoundError if there is none."""
        sandbox = cls.__new__(cls)
        sandbox._async = portal().call(
            AsyncSandbox.attach(
                sandbox_id, engine=engine, server=server, api_key=api_key, timeout=timeout, settings=settings
            )
        )
        sandbox._portal = portal()
        return sandbox

    def cleanup(self) -> None:
        """Delete the sandbox and everything in it. May be called again."""
        self._portal.call(self._async.cleanup())

    def delete(self, *, export: Export | str | Path | None = None) -> None:
        """As `cleanup`. With `export` what is in `/output` is copied to that directory of the host first; if that
        fails, the sandbox stays. `Export` says what else may be copied, and how much."""
        self._portal.call(self._async.delete(export=export))

    def detach(self) -> None:
        """Let go of the connection and leave the sandbox running: `attach` finds it again."""
        self._portal.call(self._async.detach())

    def inspect(self) -> Observation:
        """What the engine sees of it right now, and why it ended if it has."""
        return self._portal.call(self._async.inspect())

    def info(self) -> SandboxDetails:
        """The sandbox's engine, image and isolation, and the limits that hold, asked for or default."""
        return self._portal.call(self._async.info())

    def stats(self) -> Stats:
        """Resources in use."""
        return self._portal.call(self._async.stats())

    def keep_alive(self, seconds: float) -> None:
        """Count the sandbox as in use for this many seconds from now, at most a day. Its lifetime still ends it.

        This matters for sandboxes of a manager or a server, which end or pause idle ones. No other sandbox ends by
        being idle.
        """
        self._portal.call(self._async.keep_alive(seconds))

    def fork(
        self,
        count: int = 1,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> list[Self]:
        """New sandboxes that begin with the files of this one, as they are now or were at a checkpoint.

        With `memory` (or from a checkpoint that has it) its processes go on in each of them; for connections that is as
        for a `checkpoint` with memory.
        """
        return [
            self._twin(each)
            for each in self._portal.call(
                self._async.fork(count, checkpoint, memory=memory, drop_connections=drop_connections)
            )
        ]

    def __enter__(self) -> Self:
        """One that exists already, from `attach` or `fork`, is used as it is."""
        self._portal.call(self._async.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._async.__aexit__(kind, error, trace))

    def exec(
        self,
        command: CommandLine,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[str], None] | None = None,
        on_stderr: Callable[[str], None] | None = None,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        capture_output: bool | None = None,
        **names: Unpack[manus_names.CommandNames],
    ) -> ExecutionResult:
        """Run one command to its end: a shell command line, or a program and its arguments as a list.

        At the timeout (default: the sandbox's) the command dies with everything it started, and the result says so.
        Output beyond `max_output_bytes` for each stream is left out in the middle, visibly; with
        `capture_output=False` the result has none at all. Callbacks get text as it comes.
        """
        return self._portal.call(
            self._async.exec(
                command,
                timeout=timeout,
                env=env,
                cwd=cwd,
                user=user,
                stdin=stdin,
                on_stdout=on_stdout,
                on_stderr=on_stderr,
                max_output_bytes=max_output_bytes,
                capture_output=capture_output,
                **names,
            )
        )

    def start(
        self,
        command: CommandLine,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        command_id: str | None = None,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> Command:
        """Start a command in the background. Without a timeout it runs as long as the sandbox.

        With a `command_id` that was used before nothing is started: it is that command again, from its first output.
        """
        return Command(
            self._portal.call(
                self._async.start(
                    command,
                    timeout=timeout,
                    env=env,
                    cwd=cwd,
                    user=user,
                    stdin=stdin,
                    command_id=command_id,
                    max_output_bytes=max_output_bytes,
                )
            ),
            self._portal,
        )

    def command(
        self, command_id: str, *, offsets: tuple[int, int] = (0, 0), max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    ) -> Command:
        """A background command by its id, from these offsets of stdout and stderr on. FileNotFoundError if unknown."""
        return Command(
            self._portal.call(self._async.command(command_id, offsets=offsets, max_output_bytes=max_output_bytes)),
            self._portal,
        )

    def commands(self) -> list[str]:
        """The ids of all commands that run or whose output is kept."""
        return self._portal.call(self._async.commands())

    def run_command(self, command: str, timeout: float | None = None, *, shell: str = "default") -> str:
        """Type a command into the sandbox's persistent shell; returns what a person would see.

        Directory, variables and functions survive from one call to the next. `shell` names one of several. A timeout
        kills the command, not the shell, and raises SandboxTimeoutError.
        """
        return self._portal.call(self._async.run_command(command, timeout, shell=shell))

    def shell(self, name: str = "default") -> Shell:
        """The persistent shell of that name; `run` on it gives the exit code too."""
        return Shell(self._async.shell(name), self._portal)

    def open_terminal(
        self,
        command: CommandLine | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> Terminal:
        """A program (default: a shell) on a terminal of its own: full-screen programs, Ctrl-C and resizing work."""
        return Terminal(
            self._portal.call(
                self._async.open_terminal(command, rows=rows, columns=columns, env=env, cwd=cwd, user=user)
            ),
            self._portal,
        )

    def read_file(self, path: str) -> str:
        """The text of a file. FileNotFoundError if there is none; UnicodeDecodeError if it is not UTF-8."""
        return self._portal.call(self._async.read_file(path))

    def read_bytes(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """The content of a file, or a part of it."""
        return self._portal.call(self._async.read_bytes(path, offset=offset, length=length))

    def read_stream(self, path: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The content of a file piece by piece, whatever its size."""
        return self._portal.iterate(self._async.read_stream(path, offset=offset, length=length))

    def write_file(self, path: str, content: str | bytes, *, mode: int | None = None) -> None:
        """Write a file; parents are made. Readers see the old content or the new, never a part."""
        self._portal.call(self._async.write_file(path, content, mode=mode))

    def write_stream(
        self, path: str, pieces: Iterable[bytes], *, mode: int | None = None, append: bool = False
    ) -> None:
        """As `write_file`, from pieces; with `append`, as `append_file`."""
        self._portal.call(self._async.write_stream(path, pieces, mode=mode, append=append))

    def append_file(self, path: str, content: str | bytes) -> None:
        """Add to the end of a file, which is made if missing."""
        self._portal.call(self._async.append_file(path, content))

    def list_files(self, path: str = ".") -> list[FileInfo]:
        """What is in a directory, by name."""
        return self._portal.call(self._async.list_files(path))

    def walk(self, path: str = ".", *, limit: int = 100000) -> Iterator[FileInfo]:
        """Everything below a directory, parents first. Links are never followed."""
        return self._portal.iterate(self._async.walk(path, limit=limit))

    def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What kind of file it is, its size, mode, owner and time."""
        return self._portal.call(self._async.stat(path, follow=follow))

    def exists(self, path: str) -> bool:
        """Whether there is anything of that name."""
        return self._portal.call(self._async.exists(path))

    def make_dir(self, path: str, *, mode: int = 493) -> None:
        """Make a directory and its parents; an existing one is fine."""
        self._portal.call(self._async.make_dir(path, mode=mode))

    def move(self, path: str, target: str) -> None:
        """Rename, also over an existing file."""
        self._portal.call(self._async.move(path, target))

    def remove(self, path: str, *, recursive: bool = True, missing_ok: bool = False) -> None:
        """Remove a file, or a directory and everything in it. Links are removed, not followed."""
        self._portal.call(self._async.remove(path, recursive=recursive, missing_ok=missing_ok))

    def chmod(self, path: str, mode: int) -> None:
        """Change the permissions of a file."""
        self._portal.call(self._async.chmod(path, mode))

    def watch(self, path: str = ".", *, recursive: bool = True) -> FileWatch:
        """Changes below a directory as they happen: `with sandbox.watch() as events`, then iterate."""
        return FileWatch(self._async.watch(path, recursive=recursive), self._portal)

    def copy_to(self, source: str | Path, target: str) -> None:
        """Copy a file or a tree from the host into the sandbox: modes, empty directories and odd names are kept.

        A file goes to `target`, or into it if `target` ends with `/` or is a directory. The content of a directory
        goes into the directory `target`. Links are copied as links.
        """
        self._portal.call(self._async.copy_to(source, target))

    def copy_from(
        self, source: str, target: str | Path, *, max_bytes: int | None = None, max_items: int | None = None
    ) -> None:
        """Copy a file or a tree from the sandbox to the host. Nothing outside `target` is ever touched.

        Works as `copy_to` in the other direction; set-uid bits and owners are not kept. SandboxResourceError beyond
        `max_bytes` or `max_items`.
        """
        self._portal.call(self._async.copy_from(source, target, max_bytes=max_bytes, max_items=max_items))

    def checkpoint(
        self, name: str = "", *, memory: bool = False, drop_connections: bool = False, made_by: str = "user"
    ) -> Checkpoint:
        """Keep the state of all files, at one moment, while the sandbox runs. Milliseconds, whatever the size.

        With `memory` also of all processes, which then go on from there after a rollback or in a fork; it needs
        isolation="gvisor". Persistent shells and followed commands are connected again by their next use. Connections
        to the outside (`open_connections`) cannot be saved: if there are any it is refused, unless they may be dropped.
        """
        return self._portal.call(
            self._async.checkpoint(name, memory=memory, drop_connections=drop_connections, made_by=made_by)
        )

    def pause(self, *, memory: str = "ram", drop_connections: bool = False) -> None:
        """Stop all processes until `resume`. With memory="disk" they take no memory meanwhile (isolation="gvisor"); for
        connections that is as for a `checkpoint` with memory."""
        self._portal.call(self._async.pause(memory=memory, drop_connections=drop_connections))

    def resume(self) -> None:
        """Let it go on. May be repeated."""
        self._portal.call(self._async.resume())

    def checkpoints(self) -> list[Checkpoint]:
        """All of this sandbox, oldest first; `parent` makes them a tree."""
        return self._portal.call(self._async.checkpoints())

    def delete_checkpoint(self, checkpoint: Checkpoint | str) -> None:
        """Others are not affected. May be repeated."""
        self._portal.call(self._async.delete_checkpoint(checkpoint))

    def diff(self, old: Checkpoint | str, new: Checkpoint | str | None = None, *, text: bool = False) -> list[Change]:
        """What was added, changed and removed from one checkpoint to another, or to now. `text` adds unified diffs."""
        return self._portal.call(self._async.diff(old, new, text=text))

    def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Go back: processes end, files are as they were, the sandbox goes on under the same id."""
        self._portal.call(self._async.rollback(checkpoint))

    def restart(self) -> None:
        """Go back to the state right after it was created. Its setup commands run again."""
        self._portal.call(self._async.restart())

    def undo(self, steps: int = 1) -> Checkpoint:
        """Take back the last commands: go to the checkpoint that was made before them (`undo=True` makes those)."""
        return self._portal.call(self._async.undo(steps))

    def snapshot(
        self,
        name: str,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> Snapshot:
        """Keep a state under a name of its own, also after the sandbox is gone: `Sandbox(image="snapshot:NAME")`.

        With `memory` (of now, or of a checkpoint that has it) also what runs, with all that is in the memory of
        programs, secrets included; it goes on in sandboxes with the same isolation and network, here or elsewhere.
        """
        return self._portal.call(
            self._async.snapshot(name, checkpoint, memory=memory, drop_connections=drop_connections)
        )

    def set_network(self, policy: str | Mapping[str, object] | NetworkRules) -> None:
        """What it may reach from now on: `none`, `all`, or rules as for `network`. Ends what the policy forbids."""
        self._portal.call(self._async.set_network(policy))

    def network_log(self) -> list[Refusal]:
        """What was refused, oldest first: when, where to, under which name, and by which rule."""
        return self._portal.call(self._async.network_log())

    def open_connections(self) -> list[str]:
        """The far ends, as ADDRESS:PORT, of the TCP connections that it has to the outside. No saved memory keeps
        them."""
        return self._portal.call(self._async.open_connections())

    def ports(self) -> list[ListeningPort]:
        """The TCP ports that something in the sandbox listens on, with its process, sorted by port."""
        return self._portal.call(self._async.ports())

    def port_link(self, port: int, *, lifetime: float = 3600) -> str:
        """A URL that leads to a port inside for so many seconds, for whoever has it. Only with a server: without one
        `expose` gives a port of this machine."""
        return self._portal.call(self._async.port_link(port, lifetime=lifetime))

    def expose(self, port: int, local_port: int = 0, *, host: str = "127.0.0.1") -> Forward:
        """Let a port of this machine (0: any free one) lead to a port inside, also with the network off."""
        return Forward(self._portal.call(self._async.expose(port, local_port, host=host)), self._portal)

    def connect_port(self, port: int) -> Port:
        """A stream to a TCP port that something in the sandbox listens on; works with the network off."""
        return Port(self._portal.call(self._async.connect_port(port)), self._portal)

    def connect_socket(self, path: str) -> Port:
        """A stream to a unix socket in the sandbox."""
        return Port(self._portal.call(self._async.connect_socket(path)), self._portal)
