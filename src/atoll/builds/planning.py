"""From a Dockerfile to the steps of a build, with all keys.

Nothing runs here: base images are fetched, and files of the context are read.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import secrets
from collections.abc import Sequence

from atoll import workers
from atoll.builds.bases import Base, Bases
from atoll.builds.configuration import DEFAULT_SHELL, changed
from atoll.builds.dockerfile import heredocs
from atoll.builds.dockerfile.checks import Checked, CheckedStage, find_stage
from atoll.builds.dockerfile.ignore import IgnoreRules
from atoll.builds.dockerfile.instructions import (
    Arg,
    Cmd,
    Copy,
    Dockerfile,
    Env,
    Heredoc,
    Instruction,
    Mount,
    Run,
    WorkDir,
)
from atoll.builds.dockerfile.variables import SubstitutionError, expand_text
from atoll.builds.failures import explained
from atoll.builds.renewals import Renewals
from atoll.builds.request import BuildRequest
from atoll.builds.scope import Scope
from atoll.builds.source_tree import Source, SourceTree
from atoll.builds.steps import CopyFiles, MakeDirectory, Origin, RunCommand, RunMount, StagePlan, Step, key_of
from atoll.engines.host.environment import PATH
from atoll.errors import BuildError
from atoll.images import ImageConfig

Selections = dict[str, list[Source]]
"""What the steps copy from the context, by the keys of the steps."""
_MODE = re.compile(r"0*[0-7]{1,4}")
_URL = re.compile(r"(?:https?|ftp|git|ssh)://|git@", re.IGNORECASE)


class Planner:
    def __init__(
        self,
        request: BuildRequest,
        dockerfile: Dockerfile,
        checked: Checked,
        context: SourceTree,
        bases: Bases,
        renewals: Renewals,
    ) -> None:
        self._request = request
        self._dockerfile = dockerfile
        self._checked = checked
        self._context = context
        self._bases = bases
        self._renewals = renewals
        self._stages: dict[int, StagePlan] = {}
        self._scopes: dict[int, Scope] = {}
        self._number = 0
        self._context_origin = Origin("context")
        self.selections: Selections = {}

    async def plan(self) -> list[StagePlan]:
        """Return the plans of the stages that the target needs, in the order of the file; the target is the last."""
        for each in self._checked.stages:
            with explained(each.stage.place, each.stage.text):
                plan = await self._begin(each)
            self._stages[each.index] = plan
            scope = self._scopes[each.index] = self._scope(plan, each.base_stage)
            await _StagePlanner(self, plan, each.index, scope).add(each.stage.instructions)
        return [self._stages[each.index] for each in self._checked.stages]

    async def _begin(self, checked: CheckedStage) -> StagePlan:
        title = checked.stage.name or f"stage {checked.index}"
        if checked.base_stage is not None:
            below = self._stages[checked.base_stage]
            return StagePlan(title, below.image, below.spec_image, below, below.files_key, below.config)
        base = await self._bases.find(checked.base)
        return StagePlan(title, base.image, base.spec_image, None, base.key, base.config)

    def _scope(self, plan: StagePlan, below: int | None) -> Scope:
        known = self._scopes[below].variables() if below is not None else {}
        env = dict(plan.config.env)
        return Scope(env, self._request.args, self._checked.arguments, self._dockerfile.escape, known)

    async def origin(self, name: str, index: int) -> Origin:
        """Return what `--from` names in the stage of this number; the context if it is empty."""
        if not name:
            return self._context_origin
        number = find_stage(self._dockerfile, name, index)
        if number is not None:
            return Origin("stage", stage=self._stages[number])
        base: Base = await self._bases.find(name)
        if base.image is None:
            raise BuildError(
                f"nothing can be copied from {name[:200]!r}", hint="Begin a stage with it: FROM … AS NAME."
            )
        return Origin("image", image=base.image)

    async def selected(self, patterns: Sequence[str], exclude: IgnoreRules | None = None) -> tuple[list[Source], str]:
        """Return what these sources of the context stand for, and the digest of it."""

        def work() -> tuple[list[Source], str]:
            found = [each for pattern in patterns for each in self._context.select(pattern, exclude)]
            return found, self._context.digest(found).hex()

        return await workers.run(workers.TRANSFER, work)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    async def first_key(self, key: str, plan: StagePlan) -> str:
        """Return the key of the first step of a stage, which builds without the cache replace by another one."""
        salt = (
            secrets.token_hex(16)
            if self._request.no_cache
            else await workers.run(workers.ENGINE, self._renewals.of, key)
        )
        if self._request.no_cache:
            plan.renewal = (key, salt)
        return key_of(key, "renewed", salt) if salt else key

    def secret(self, mount: Mount, name: str) -> bool:
        """Return whether the secret of a mount was given. Raises BuildError if it is required and was not."""
        if name in self._request.secrets:
            return True
        if mount.required:
            raise BuildError(
                f"the secret {name[:80]!r} was not given", hint=f"Give it: --secret id={name[:80]},src=FILE."
            )
        return False


class _StagePlanner:
    """Goes through the instructions of one stage, as they change its variables, configuration and files."""

    def __init__(self, planner: Planner, plan: StagePlan, index: int, scope: Scope) -> None:
        self._planner = planner
        self._plan = plan
        self._index = index
        self._scope = scope
        self._has_cmd = False

    async def add(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            with explained(instruction.place, instruction.text):
                try:
                    await self._add(instruction)
                except SubstitutionError as error:
                    raise BuildError(str(error)) from error

    @property
    def _config(self) -> ImageConfig:
        return self._plan.config

    async def _add(self, instruction: Instruction) -> None:
        match instruction:
            case Arg():
                self._scope.declare(instruction)
            case Env():
                self._scope.set(instruction)
                self._plan.config = dataclasses.replace(self._config, env=dict(self._scope.env))
            case WorkDir():
                await self._work_dir(instruction)
            case Run():
                await self._run(instruction)
            case Copy():
                await self._copy(instruction)
            case _:
                config = changed(self._config, instruction, self._scope.expand, has_own_cmd=self._has_cmd)
                if config is None:
                    raise BuildError(f"{instruction.text.split()[0]} is not supported")
                self._has_cmd = self._has_cmd or isinstance(instruction, Cmd)
                self._plan.config = config

    async def _step(
        self, instruction: Instruction, action: RunCommand | CopyFiles | MakeDirectory, *parts: object
    ) -> Step:
        key = key_of(self._plan.files_key, *parts)
        if not self._plan.steps:
            key = await self._planner.first_key(key, self._plan)
        step = Step(self._planner.next_number(), self._plan.name, instruction.place, instruction.text, action, key)
        self._plan.steps.append(step)
        return step

    def _path(self, text: str) -> str:
        """Return a path inside as an absolute one. A slash at its end stays."""
        full = posixpath.join(self._config.work_dir or "/", text)
        clean = "/" + posixpath.normpath(full).lstrip("/")
        is_directory = text.endswith(("/", "/.")) or text in (".", "")
        return clean if clean == "/" or not is_directory else clean + "/"

    async def _work_dir(self, instruction: WorkDir) -> None:
        path = self._path(self._scope.expand(instruction.path)).rstrip("/") or "/"
        self._plan.config = dataclasses.replace(self._config, work_dir=path)
        if path != "/":
            user = self._config.user
            await self._step(instruction, MakeDirectory(path, user), "directory", path, *([user] if user else []))

    async def _run(self, run: Run) -> None:
        script = heredocs.script(run)
        shell = self._config.shell or DEFAULT_SHELL
        argv = (*shell, heredocs.shell_text(run)) if run.command.is_shell else run.command.words
        mounts = tuple([found for mount in run.mounts if (found := await self._mount(mount)) is not None])
        action = RunCommand(
            argv=argv,
            env=self._scope.of_commands(PATH),
            proxies=self._scope.proxies(),
            user=self._config.user,
            work_dir=self._config.work_dir or "/",
            network=run.network,
            mounts=mounts,
            script=script,
        )
        text = script.content if script is not None else ""
        place = [action.user, action.work_dir, action.network]
        await self._step(run, action, "run", argv, text, action.env, place, [_mount_key(each) for each in mounts])

    async def _mount(self, mount: Mount) -> RunMount | None:
        expand = self._scope.expand
        name = expand(mount.id)
        if mount.type == "secret":
            name = name or posixpath.basename(expand(mount.target))
            if not self._planner.secret(mount, name):
                return None
            target = expand(mount.target) or ("" if mount.env else f"/run/secrets/{name}")
        else:
            target = expand(mount.target)
        path = self._path(target).rstrip("/") if target else ""
        if mount.type != "secret" and not path:
            raise BuildError("a mount cannot cover the whole root directory", hint="Give it another target.")
        origin, digest = None, ""
        source = expand(mount.source) or "/"
        if mount.type == "bind" or mount.source_stage:
            origin = await self._planner.origin(mount.source_stage, self._index)
            if origin.kind == "context":
                _, digest = await self._planner.selected([source])
        return RunMount(
            type=mount.type,
            target=path,
            id=name or path,
            source=source,
            origin=origin,
            writable=mount.writable,
            sharing=mount.sharing,
            mode=mount.mode,
            uid=mount.uid,
            gid=mount.gid,
            size_bytes=mount.size_bytes,
            env=mount.env,
            required=mount.required,
            digest=digest,
        )

    async def _copy(self, copy: Copy) -> None:
        expand = self._scope.expand
        patterns = tuple(expand(word) for word in copy.sources)
        for pattern in patterns:
            if copy.is_add and _URL.match(pattern):
                raise BuildError(
                    "ADD of a URL is not supported: the network policy of a build is enforced inside its sandboxes",
                    hint="Fetch it by RUN curl, with --network, or put it into the context.",
                )
        mode = expand(copy.mode)
        if mode and not (
            mode.isascii() and mode.isdecimal() and set(mode) <= set("01234567") and int(mode, 8) <= 0o7777
        ):
            raise BuildError(f"{mode[:80]!r} is not a mode", hint="Write --chmod with octal digits, such as 755.")
        rules = "\n".join(expand(word) for word in copy.exclude).encode(errors="surrogateescape")
        exclude = IgnoreRules.parse(rules, "--exclude") if copy.exclude else None
        written = tuple(self._substituted(each) for each in copy.heredocs)
        origin = await self._planner.origin(copy.source_stage, self._index)
        action = CopyFiles(
            sources=patterns,
            target=self._path(expand(copy.target)),
            origin=origin,
            heredocs=written,
            is_add=copy.is_add,
            owner=expand(copy.owner),
            mode=int(mode, 8) & 0o1777 if mode else None,
            exclude=exclude,
        )
        how = [action.target, action.owner, action.mode, copy.is_add, [*map(expand, copy.exclude)]]
        texts = [[each.name, each.content] for each in written]
        if origin.kind == "context":
            sources, digest = await self._planner.selected(patterns, exclude)
            step = await self._step(copy, action, "copy", how, texts, digest)
            self._planner.selections[step.key] = sources
        else:
            await self._step(copy, action, "copy from", how, texts, origin.key(), patterns)

    def _substituted(self, heredoc: Heredoc) -> Heredoc:
        if not heredoc.expand:
            return heredoc
        return dataclasses.replace(heredoc, content=expand_text(heredoc.content, self._scope.variables()))


def _mount_key(mount: RunMount) -> list[object]:
    """Return what of a mount decides the result of a step. The contents of secrets and caches do not."""
    origin = mount.origin.key() if mount.origin is not None else ""
    fixed = [
        mount.type,
        mount.target,
        mount.id,
        mount.source,
        mount.writable,
        mount.env,
        mount.mode,
        mount.uid,
        mount.gid,
    ]
    return [*fixed, origin, mount.digest]
