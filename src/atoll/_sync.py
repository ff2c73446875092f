"""The synchronous classes. Generated from the asynchronous ones by scripts/generate_sync.py."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from atoll.engines.contract import Engine
from atoll.guest.file_watch import AsyncWatch, FileEvent
from atoll.guest.files import FileInfo
from atoll.guest.port_streams import AsyncPortStream
from atoll.model import (
    ExecutionResult,
    ListedSandbox,
    ListeningPort,
    Observation,
    SandboxDetails,
    SandboxSpec,
    Stats,
    UndoRule,
    manus_names,
)
from atoll.model.checkpoint import Change, Checkpoint, Snapshot, Undo
from atoll.model.network_policy import NetworkRules
from atoll.model.volume import VolumeInfo
from atoll.network.refusals import Refusal
from atoll.sandbox.command import DEFAULT_OUTPUT_BYTES, AsyncCommand, Output
from atoll.sandbox.execution import CommandLine
from atoll.sandbox.export import Export
from atoll.sandbox.on_class import on_class_too_sync
from atoll.sandbox.options import NamedImage
from atoll.sandbox.port_forward import AsyncForward
from atoll.sandbox.portal import Portal, portal
from atoll.sandbox.sandbox import DEFAULT_TIMEOUT_S, AsyncSandbox
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.start_up import StartState
from atoll.sandbox.terminal import AsyncTerminal
from atoll.sandbox.volumes import AsyncVolumes
from atoll.settings import Settings


class Command:
    """A command of a sandbox. Iterate over it to read its output as it arrives.

    The command belongs to the sandbox, not to this object: it continues when the connection is lost or the program that
    started it dies, and its output is kept for the next program that attaches. Lost connections are reopened without a
    gap in the output.
    """

    def __init__(self, original: AsyncCommand, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def pid(self) -> int:
        """The process id inside the sandbox."""
        return self._async.pid

    @property
    def offsets(self) -> tuple[int, int]:
        """How many bytes of stdout and stderr have been read; attach with these offsets to continue."""
        return self._async.offsets

    @property
    def dropped_bytes(self) -> int:
        """How many bytes of output had already been discarded when this object attached."""
        return self._async.dropped_bytes

    @property
    def ended(self) -> bool:
        """Whether this object has read the output to its end."""
        return self._async.ended

    def __iter__(self) -> Iterator[Output]:
        """Yield the output, piece by piece, until the command ends."""
        return self._portal.iterate(self._async.__aiter__())

    def wait(self) -> ExecutionResult:
        """Wait for the command to end. The result holds the output that this object has read."""
        return self._portal.call(self._async.wait())

    def kill(self, signal: int = 9) -> None:
        """Send a signal. Signal 9 (the default) also kills everything the command started, before `kill` returns."""
        self._portal.call(self._async.kill(signal))

    def send_stdin(self, data: str | bytes) -> None:
        """Write to the command's standard input, which needs `start(…, stdin=True)`.

        Raises BrokenPipeError once the command has ended.
        """
        self._portal.call(self._async.send_stdin(data))

    def close_stdin(self) -> None:
        """Close the command's standard input, so that it reads end-of-file."""
        self._portal.call(self._async.close_stdin())

    def detach(self) -> None:
        """Stop following the command, which continues to run. `command` on the sandbox attaches to it again."""
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
    """A named persistent shell of a sandbox. Concurrent callers take turns; a shell that has ended is restarted."""

    def __init__(self, original: AsyncShell, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    @property
    def name(self) -> str:
        return self._async.name

    def run(self, command: str, timeout: float) -> ExecutionResult:
        """Type one command and return its exit code and output, with stdout and stderr in order.

        A timeout is a result, as with `exec`.
        """
        return self._portal.call(self._async.run(command, timeout))

    def close(self) -> None:
        """End the shell and what it started. The next command starts a new one."""
        self._portal.call(self._async.close())


class Watch:
    """A watch: `with files.watch(path) as events: for event in events: ...`.

    It runs until it is closed or its `with` block ends.
    """

    def __init__(self, original: AsyncWatch, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    def __enter__(self) -> Self:
        """Start the watch. All changes made after this returns are reported."""
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
        """End the watch. An iteration that waits for an event ends too. May be repeated."""
        self._portal.call(self._async.aclose())


class PortStream:
    """A connected byte stream. Reading and writing may happen at the same time."""

    def __init__(self, original: AsyncPortStream, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    def read(self, n: int = 65536) -> bytes:
        """Return at most `n` bytes as soon as some are available, or b"" at the end."""
        return self._portal.call(self._async.read(n))

    def write(self, data: bytes) -> None:
        self._portal.call(self._async.write(data))

    def write_eof(self) -> None:
        """Close the writing side. Reading can continue."""
        self._portal.call(self._async.write_eof())

    def close(self) -> None:
        """Close the connection. May be repeated."""
        self._portal.call(self._async.aclose())

    def __enter__(self) -> Self:
        self._portal.call(self._async.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._portal.call(self._async.__aexit__(*_))


class Forward:
    """A port forward, open until it is closed or its `with` block ends.

    The port inside may be opened later than the forward.
    """

    def __init__(self, original: AsyncForward, portal: Portal) -> None:
        self._async = original
        self._portal = portal

    @property
    def port(self) -> int:
        return self._async.port

    @property
    def address(self) -> tuple[str, int]:
        """The local address and port."""
        return self._async.address

    @property
    def url(self) -> str:
        """The http URL of the local port, for when the program inside is an HTTP server."""
        return self._async.url

    def close(self) -> None:
        """Close the local port and every connection through it. May be repeated."""
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

    `exec` runs one process and returns its result; `run_command` types into a persistent shell. A command that fails
    is a result; an exception means that the sandbox itself failed. Relative paths start at the work directory.

    `engine` is the name of an engine; `auto` is the first of `native`, `oci` and `bubblewrap` that works on this
    machine, and `oci` for the isolation levels `gvisor` and `vm`. With `server` (or ATOLL_URL, if no engine is named)
    the sandbox runs on that server; everything else stays the same. Each entry of `ports`
    sets an environment variable `NAME=PORT` inside, and a server exposes that port.
    """

    def __init__(
        self,
        spec: SandboxSpec | Mapping[str, object] | None = None,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        image: str | NamedImage | None = None,
        isolation: str | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: str | int | None = None,
        inodes: int | None = None,
        open_files: int | None = None,
        shm: str | int | None = None,
        env: Mapping[str, str] | None = None,
        volumes: Mapping[str, str] | Sequence[str] | None = None,
        work_dir: str | None = None,
        user: str | None = None,
        hostname: str | None = None,
        network: str | Mapping[str, object] | NetworkRules | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        lifetime: float | None = None,
        setup: Sequence[str] | None = None,
        setup_timeout: float | None = None,
        start: Sequence[object] | None = None,
        ready: object = None,
        sudo: bool | None = None,
        prewarm: str | None = None,
        undo: bool | Undo | UndoRule = False,
        name: str | None = None,
        task_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
        settings: Settings | None = None,
        **names: Unpack[manus_names.SandboxNames],
    ) -> None:
        """Describe a sandbox, without creating it yet. All times are in seconds.

        `spec` may be a `SandboxSpec`, a mapping as in a request to a server, or a mapping as in the Manus
        example, where `timeout` is the lifetime of the sandbox; it takes the place of the options. As a
        keyword, `timeout` is how long a command may take, and `lifetime` how long the sandbox may exist.
        `setup` holds command lines that run before `create` returns, `start` commands that run from then on,
        and `ready` is what `create` waits for. `atoll.sandbox.options.SpecOptions` explains each option.
        """
        self._async = AsyncSandbox(
            spec,
            engine=engine,
            server=server,
            api_key=api_key,
            image=image,
            isolation=isolation,
            memory=memory,
            cpus=cpus,
            pids=pids,
            disk=disk,
            inodes=inodes,
            open_files=open_files,
            shm=shm,
            env=env,
            volumes=volumes,
            work_dir=work_dir,
            user=user,
            hostname=hostname,
            network=network,
            timeout=timeout,
            lifetime=lifetime,
            setup=setup,
            setup_timeout=setup_timeout,
            start=start,
            ready=ready,
            sudo=sudo,
            prewarm=prewarm,
            undo=undo,
            name=name,
            task_id=task_id,
            labels=labels,
            ports=ports,
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
        """The sandbox's spec."""
        return self._async.spec

    @property
    def engine_name(self) -> str:
        """The name of the engine that the sandbox runs on."""
        return self._async.engine_name

    @on_class_too_sync
    def create(self) -> Self:
        """Create the sandbox, run its setup commands, start its start commands and wait until it is ready. A failure
        leaves nothing behind.

        On the class, `create` takes the options of a sandbox: `await AsyncSandbox.create(image="host")`.
        """
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
        """Find an existing sandbox by its id or name, whichever program created it. Raises SandboxNotFoundError.

        `auto` looks at every engine of this machine.
        """
        made = cls.__new__(cls)
        made._async = portal().call(
            AsyncSandbox.attach(
                sandbox_id, engine=engine, server=server, api_key=api_key, timeout=timeout, settings=settings
            )
        )
        made._portal = portal()
        return made

    def cleanup(self) -> None:
        """Delete the sandbox and everything in it. May be repeated."""
        self._portal.call(self._async.cleanup())

    def delete(self, *, export: Export | str | Path | None = None) -> None:
        """Delete the sandbox, like `cleanup`. With `export`, first copy `/output` to that directory of the host; if
        that fails, the sandbox stays. Pass an `Export` to copy another directory or change the limits of the copy."""
        self._portal.call(self._async.delete(export=export))

    def detach(self) -> None:
        """Close the connection and leave the sandbox running. `attach` finds it again."""
        self._portal.call(self._async.detach())

    def inspect(self) -> Observation:
        """Return the current state of the sandbox according to its engine, and the cause of its end if it has ended."""
        return self._portal.call(self._async.inspect())

    def info(self) -> SandboxDetails:
        """Return the sandbox's engine, its image and what that says, and the isolation level, limits, work directory
        and user that it has, requested or not."""
        return self._portal.call(self._async.info())

    def stats(self) -> Stats:
        """Return the resources that the sandbox uses now."""
        return self._portal.call(self._async.stats())

    def keep_alive(self, seconds: float) -> None:
        """Count the sandbox as in use for this many seconds from now, at most a day. Its lifetime still ends it.

        This matters only for the sandboxes of a manager or a server, which end or pause idle ones.
        """
        self._portal.call(self._async.keep_alive(seconds))

    def fork(
        self,
        count: int = 1,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> builtins.list[Self]:
        """Create sandboxes that start with the files of this one, as they are now or were at a checkpoint.

        With `memory` (or from a checkpoint with saved memory) its processes continue in each of them. The rules for
        open connections are then those of `checkpoint` with memory.
        """
        return [
            self._twin(each)
            for each in self._portal.call(
                self._async.fork(count, checkpoint, memory=memory, drop_connections=drop_connections)
            )
        ]

    def __enter__(self) -> Self:
        """Create the sandbox, unless it exists already because it comes from `attach` or `fork`."""
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
        """Run one command and wait for it: a shell command line, or a program and its arguments as a list.

        At the timeout (default: the sandbox's) the command and everything it started are killed, and the cause of the
        result is `timeout`. If a stream exceeds `max_output_bytes`, its middle is replaced by a visible mark; with
        `capture_output=False` the result has no output. Callbacks receive text as it arrives.
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
        """Start a command in the background. Without a timeout it may run as long as the sandbox.

        If a command with this `command_id` exists, none is started; the existing one is returned, with its output from
        the beginning.
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
        """Attach to a background command, from these offsets of stdout and stderr. FileNotFoundError if unknown."""
        return Command(
            self._portal.call(self._async.command(command_id, offsets=offsets, max_output_bytes=max_output_bytes)),
            self._portal,
        )

    def commands(self) -> builtins.list[str]:
        """Return the ids of all commands that are running or whose output is kept."""
        return self._portal.call(self._async.commands())

    def start_commands(self) -> builtins.list[StartState]:
        """Return the start commands of the sandbox's spec: whether they run, and how often they were restarted."""
        return self._portal.call(self._async.start_commands())

    def run_command(self, command: str, timeout: float | None = None, *, shell: str = "default") -> str:
        """Type a command into a persistent shell and return its output, stdout and stderr in order.

        The shell's directory, variables and functions survive from one call to the next. `shell` selects one of several
        shells by name. A timeout kills the command, not the shell, and raises SandboxTimeoutError.
        """
        return self._portal.call(self._async.run_command(command, timeout, shell=shell))

    def shell(self, name: str = "default") -> Shell:
        """Return the persistent shell of this name. Its `run` also reports the exit code."""
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
        """Start a program (default: a shell) on a new terminal: full-screen programs, Ctrl-C and resizing work."""
        return Terminal(
            self._portal.call(
                self._async.open_terminal(command, rows=rows, columns=columns, env=env, cwd=cwd, user=user)
            ),
            self._portal,
        )

    def read_file(self, path: str) -> str:
        """Return the text of a file. FileNotFoundError if it does not exist; UnicodeDecodeError if it is not UTF-8."""
        return self._portal.call(self._async.read_file(path))

    def read_bytes(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Return the content of a file, or a part of it."""
        return self._portal.call(self._async.read_bytes(path, offset=offset, length=length))

    def read_stream(self, path: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield the content of a file in pieces, so that its size does not matter."""
        return self._portal.iterate(self._async.read_stream(path, offset=offset, length=length))

    def write_file(self, path: str, content: str | bytes, *, mode: int | None = None) -> None:
        """Write a file atomically: readers see the old content or the new, never a part. Creates missing parents."""
        self._portal.call(self._async.write_file(path, content, mode=mode))

    def write_stream(
        self, path: str, pieces: Iterable[bytes], *, mode: int | None = None, append: bool = False
    ) -> None:
        """Write a file from pieces, like `write_file`; with `append`, like `append_file`."""
        self._portal.call(self._async.write_stream(path, pieces, mode=mode, append=append))

    def append_file(self, path: str, content: str | bytes) -> None:
        """Append to a file, which is created if missing."""
        self._portal.call(self._async.append_file(path, content))

    def list_files(self, path: str = ".") -> builtins.list[FileInfo]:
        """Return the entries of a directory, sorted by name."""
        return self._portal.call(self._async.list_files(path))

    def walk(self, path: str = ".", *, limit: int = 100000) -> Iterator[FileInfo]:
        """Yield everything below a directory, parents first. Symbolic links are never followed."""
        return self._portal.iterate(self._async.walk(path, limit=limit))

    def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """Return the type, size, mode, owner and modification time of a file."""
        return self._portal.call(self._async.stat(path, follow=follow))

    def exists(self, path: str) -> bool:
        """Return whether the path exists. A symbolic link exists even if its target does not."""
        return self._portal.call(self._async.exists(path))

    def make_dir(self, path: str, *, mode: int = 493) -> None:
        """Create a directory and its parents. An existing directory is not an error."""
        self._portal.call(self._async.make_dir(path, mode=mode))

    def move(self, path: str, target: str) -> None:
        """Rename a file or directory. An existing file at the target is replaced."""
        self._portal.call(self._async.move(path, target))

    def remove(self, path: str, *, recursive: bool = True, missing_ok: bool = False) -> None:
        """Remove a file, or a directory and everything in it. Symbolic links are removed, not followed."""
        self._portal.call(self._async.remove(path, recursive=recursive, missing_ok=missing_ok))

    def chmod(self, path: str, mode: int) -> None:
        """Change the permissions of a file."""
        self._portal.call(self._async.chmod(path, mode))

    def watch(self, path: str = ".", *, recursive: bool = True) -> Watch:
        """Watch a directory for changes: `with sandbox.watch() as events`, then iterate."""
        return Watch(self._async.watch(path, recursive=recursive), self._portal)

    def copy_to(self, source: str | Path, target: str) -> None:
        """Copy a file or a tree from the host into the sandbox.

        A file goes to `target`, or into it if `target` ends with `/` or is a directory. The content of a directory
        goes into the directory `target`. Modes, empty directories and unusual names are kept; symbolic links are copied
        as links.
        """
        self._portal.call(self._async.copy_to(source, target))

    def copy_from(
        self, source: str, target: str | Path, *, max_bytes: int | None = None, max_items: int | None = None
    ) -> None:
        """Copy a file or a tree from the sandbox to the host. Nothing outside `target` is changed.

        The rules are those of `copy_to`, except that set-uid bits and owners are not kept. Raises SandboxResourceError
        beyond `max_bytes` or `max_items`.
        """
        self._portal.call(self._async.copy_from(source, target, max_bytes=max_bytes, max_items=max_items))

    def checkpoint(
        self, name: str = "", *, memory: bool = False, drop_connections: bool = False, made_by: str = "user"
    ) -> Checkpoint:
        """Save the state of all files atomically while the sandbox runs. This takes milliseconds, whatever their size.

        With `memory`, also save the memory of all processes, which then continue from there after a rollback or in a
        fork; this needs isolation="gvisor". The next use of a persistent shell or a followed command reconnects to it.
        Connections to the outside (`open_connections`) cannot be saved: if there are any, UnsupportedError is raised,
        unless `drop_connections` is set.
        """
        return self._portal.call(
            self._async.checkpoint(name, memory=memory, drop_connections=drop_connections, made_by=made_by)
        )

    def pause(self, *, memory: str = "ram", drop_connections: bool = False) -> None:
        """Stop all processes until `resume`.

        With memory="disk", which needs isolation="gvisor", they use no memory while paused. The rules for open
        connections are then those of `checkpoint` with memory.
        """
        self._portal.call(self._async.pause(memory=memory, drop_connections=drop_connections))

    def resume(self) -> None:
        """Let a paused sandbox continue. May be repeated."""
        self._portal.call(self._async.resume())

    def checkpoints(self) -> builtins.list[Checkpoint]:
        """Return all checkpoints of this sandbox, oldest first. Their `parent` fields form a tree."""
        return self._portal.call(self._async.checkpoints())

    def delete_checkpoint(self, checkpoint: Checkpoint | str) -> None:
        """Delete a checkpoint; others are not affected. May be repeated."""
        self._portal.call(self._async.delete_checkpoint(checkpoint))

    def diff(
        self, old: Checkpoint | str, new: Checkpoint | str | None = None, *, text: bool = False
    ) -> builtins.list[Change]:
        """Return the files added, changed and removed between two checkpoints, or since one (`new` None).

        `text` adds unified diffs.
        """
        return self._portal.call(self._async.diff(old, new, text=text))

    def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Put the sandbox back into the state of a checkpoint. Processes end; the sandbox keeps its id, and its start
        commands run again."""
        self._portal.call(self._async.rollback(checkpoint))

    def restart(self) -> None:
        """Put the sandbox back into the state right after its creation. Its setup and start commands
        run again."""
        self._portal.call(self._async.restart())

    def undo(self, steps: int = 1) -> Checkpoint:
        """Undo the last commands: go back to the checkpoint made before them. Needs `undo=True`, which makes those."""
        return self._portal.call(self._async.undo(steps))

    def snapshot(
        self,
        name: str,
        checkpoint: Checkpoint | str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> Snapshot:
        """Save a state under a name. It outlives the sandbox; new ones start from it with image="snapshot:NAME".

        With `memory` (current, or of a checkpoint that has it) the snapshot includes the memory of running processes
        with any secrets in it. The processes continue in sandboxes with the same isolation level and network, on this
        host or another.
        """
        return self._portal.call(
            self._async.snapshot(name, checkpoint, memory=memory, drop_connections=drop_connections)
        )

    def set_network(self, policy: str | Mapping[str, object] | NetworkRules) -> None:
        """Replace the network policy: `none`, `all`, or rules as for `network`.

        Open connections that the new policy forbids are closed.
        """
        self._portal.call(self._async.set_network(policy))

    def network_log(self) -> builtins.list[Refusal]:
        """Return the refusals, oldest first: time, destination, host name, and the rule that refused."""
        return self._portal.call(self._async.network_log())

    def open_connections(self) -> builtins.list[str]:
        """Return the remote ends, as ADDRESS:PORT, of the sandbox's TCP connections to the outside.

        Saved memory cannot include these connections.
        """
        return self._portal.call(self._async.open_connections())

    def ports(self) -> builtins.list[ListeningPort]:
        """Return the TCP ports that processes in the sandbox listen on, with the process of each, sorted by port."""
        return self._portal.call(self._async.ports())

    def port_link(self, port: int, *, lifetime: float = 3600) -> str:
        """Return a signed URL to a port in the sandbox, valid for `lifetime` seconds without other credentials.

        Needs a server; without one, use `expose`, which opens a port on this machine.
        """
        return self._portal.call(self._async.port_link(port, lifetime=lifetime))

    def expose(self, port: int, local_port: int = 0, *, host: str = "127.0.0.1") -> Forward:
        """Forward a local port (0: any free one) to a port in the sandbox. This works with the network off."""
        return Forward(self._portal.call(self._async.expose(port, local_port, host=host)), self._portal)

    def connect_port(self, port: int) -> PortStream:
        """Connect to a TCP port that a process in the sandbox listens on. This works with the network off."""
        return PortStream(self._portal.call(self._async.connect_port(port)), self._portal)

    def connect_socket(self, path: str) -> PortStream:
        """Connect to a Unix socket in the sandbox."""
        return PortStream(self._portal.call(self._async.connect_socket(path)), self._portal)

    def set_limits(
        self,
        *,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: str | int | None = None,
    ) -> SandboxDetails:
        """Change limits while the sandbox runs, and return the limits that are then in effect.

        Only those that are given change: all of them, or none if this raises. `memory="512m"` is written as for a new
        sandbox. Raises UnsupportedError for a limit that the engine cannot change, and SandboxResourceError for one
        below what the sandbox uses now. The change lasts for the life of the sandbox, and its forks have it too.
        """
        return self._portal.call(self._async.set_limits(memory=memory, cpus=cpus, pids=pids, disk=disk))

    @classmethod
    def snapshots(
        cls,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[Snapshot]:
        """Return all snapshots, which `snapshot` of a sandbox makes. New sandboxes start from one with
        `image="snapshot:NAME"`."""
        return portal().call(AsyncSandbox.snapshots(engine=engine, server=server, api_key=api_key, settings=settings))

    @classmethod
    def delete_snapshot(
        cls,
        name: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Delete a snapshot. Sandboxes that were made from it are not affected."""
        portal().call(
            AsyncSandbox.delete_snapshot(name, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    @classmethod
    def export_snapshot(
        cls,
        name: str,
        path: str | Path,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Write a snapshot to a file of this machine, for another machine."""
        portal().call(
            AsyncSandbox.export_snapshot(name, path, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    @classmethod
    def import_snapshot(
        cls,
        path: str | Path,
        name: str,
        *,
        memory: bool = False,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> Snapshot:
        """Take over a file that `export_snapshot` wrote, under this name. The file is checked first.

        With `memory`, also take over its saved memory; do that only with files that you trust.
        """
        return portal().call(
            AsyncSandbox.import_snapshot(
                path, name, memory=memory, engine=engine, server=server, api_key=api_key, settings=settings
            )
        )

    @classmethod
    def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[ListedSandbox]:
        """Return the sandboxes of this machine, or those of the caller on a server, oldest first; with `labels`, only
        those that have them.

        `auto` stands for all engines that work on this machine.
        """
        return portal().call(
            AsyncSandbox.list(labels=labels, engine=engine, server=server, api_key=api_key, settings=settings)
        )


class Volumes:
    """The named volumes of this machine's user, or those of the caller on a server.

    A sandbox mounts them by name: `AsyncSandbox(volumes={"data": "/data"})`. One that does not exist is made then.
    `engine`, `server` and `api_key` say where they are, as for `AsyncSandbox`; `native` and `oci` share them.
    """

    @classmethod
    def create(
        cls,
        name: str,
        *,
        size: str | int | None = None,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Make an empty volume, which can hold `size` bytes or text such as `2g`. Raises ConflictError if there is one
        of that name."""
        return portal().call(
            AsyncVolumes.create(name, size=size, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    @classmethod
    def list(
        cls,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[VolumeInfo]:
        """Return all volumes, oldest first. Their users are not looked for; `inspect` does that."""
        return portal().call(AsyncVolumes.list(engine=engine, server=server, api_key=api_key, settings=settings))

    @classmethod
    def inspect(
        cls,
        name: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Return a volume, with the sandboxes that mount it. Raises VolumeNotFoundError."""
        return portal().call(
            AsyncVolumes.inspect(name, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    @classmethod
    def remove(
        cls,
        name: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Remove a volume with everything in it. Raises ConflictError, which names them, if sandboxes mount it."""
        portal().call(AsyncVolumes.remove(name, engine=engine, server=server, api_key=api_key, settings=settings))

    @classmethod
    def prune(
        cls,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[str]:
        """Remove all volumes that no sandbox mounts, and return their names."""
        return portal().call(AsyncVolumes.prune(engine=engine, server=server, api_key=api_key, settings=settings))

    @classmethod
    def snapshot(
        cls,
        name: str,
        snapshot: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Save the present content of a volume, which may be in use, as a read-only volume named `snapshot`."""
        return portal().call(
            AsyncVolumes.snapshot(name, snapshot, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    @classmethod
    def copy(
        cls,
        name: str,
        copy: str,
        *,
        size: str | int | None = None,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Make a writable volume named `copy` with the present content of a volume or snapshot. Equal blocks are
        shared."""
        return portal().call(
            AsyncVolumes.copy(name, copy, size=size, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    @classmethod
    def restore(
        cls,
        name: str,
        snapshot: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Replace the content of a volume by that of a snapshot or another volume. Raises ConflictError if sandboxes
        mount it."""
        return portal().call(
            AsyncVolumes.restore(name, snapshot, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    @classmethod
    def upload(
        cls,
        name: str,
        local: str | Path,
        path: str = "",
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Copy a file or directory of this machine into a volume, by a sandbox that exists only for that. `path` is
        where it goes in the volume; the default is the volume itself. The rules are those of `copy_to` of a sandbox. A
        volume that does not exist is made."""
        portal().call(
            AsyncVolumes.upload(name, local, path, engine=engine, server=server, api_key=api_key, settings=settings)
        )

    @classmethod
    def download(
        cls,
        name: str,
        path: str,
        local: str | Path,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Copy a file or directory of a volume to this machine, by a sandbox that exists only for that. An empty `path`
        is everything. The rules are those of `copy_from` of a sandbox. Raises VolumeNotFoundError."""
        portal().call(
            AsyncVolumes.download(name, path, local, engine=engine, server=server, api_key=api_key, settings=settings)
        )
