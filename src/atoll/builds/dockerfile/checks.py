"""What can be refused before anything runs, and which stages a target needs."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from atoll.builds.dockerfile.instructions import Arg, Copy, Dockerfile, Instruction, Place, Run, Stage
from atoll.builds.dockerfile.refusals import nearest, refusal, shown
from atoll.builds.dockerfile.substitutions import check_substitutions
from atoll.builds.dockerfile.variables import SubstitutionError, expand

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
_ALWAYS_KNOWN = frozenset((*_PROXIES, *(name.lower() for name in _PROXIES)))
_URL = re.compile(r"(?:https?|ftp|git|ssh)://|git@", re.IGNORECASE)
_MODE = re.compile(r"0*[0-7]{1,4}")


@dataclass(frozen=True, slots=True)
class CheckedStage:
    """A stage that is needed for the target."""

    index: int
    stage: Stage
    base: str
    """The image that it begins with, with its variables substituted, or `scratch`. Empty if it is another stage."""
    base_stage: int | None
    needs: frozenset[int]
    """The stages that have to be finished before, or of which files are used: all of them come before this one."""


@dataclass(frozen=True, slots=True)
class Checked:
    stages: tuple[CheckedStage, ...]
    """Those that the target needs, in the order of the file; the target is the last one."""
    arguments: Mapping[str, str]
    """The variables that an `ARG NAME` without a default may take its value from: those before the first FROM, with
    the build arguments, and those that describe the machine."""
    warnings: tuple[str, ...]


def machine_platform() -> str:
    """Return what Docker calls this kind of machine, such as `linux/amd64`."""
    machine = platform.machine()
    return f"linux/{_ARCHITECTURES.get(machine, machine)}"


def machine_arguments() -> dict[str, str]:
    """Return the arguments that are known without being declared before the first FROM."""
    os_name, _, architecture = machine_platform().partition("/")
    values = {"PLATFORM": f"{os_name}/{architecture}", "OS": os_name, "ARCH": architecture, "VARIANT": ""}
    return {f"{side}{name}": value for side in ("TARGET", "BUILD") for name, value in values.items()}


def check(
    dockerfile: Dockerfile,
    *,
    args: Mapping[str, str] | None = None,
    target: str = "",
    allows_url: Callable[[str], bool] = lambda url: False,
) -> Checked:
    """Check everything that can be known before anything runs. Raises DockerfileError."""
    given = args or {}
    return _Checker(dockerfile, given, allows_url).checked(target)


def find_stage(dockerfile: Dockerfile, name: str, before: int) -> int | None:
    """Return the number of the stage of that name, or number, among those before the one with the number `before`."""
    if name.isascii() and name.isdecimal() and len(name) < 6:
        return int(name) if int(name) < before else None
    names = [stage.name for stage in dockerfile.stages[:before]]
    return names.index(name.lower()) if name and name.lower() in names else None


class _Checker:
    def __init__(self, dockerfile: Dockerfile, given: Mapping[str, str], allows_url: Callable[[str], bool]) -> None:
        self._dockerfile = dockerfile
        self._given = given
        self._allows_url = allows_url
        self._arguments = machine_arguments()
        self._warnings = list(dockerfile.warnings)

    def checked(self, target: str) -> Checked:
        self._check_names()
        self._arguments["TARGETSTAGE"] = target or "default"
        self._read_arguments()
        stages = [self._stage(index, stage) for index, stage in enumerate(self._dockerfile.stages)]
        wanted = self._target(target)
        needed = {wanted}
        for index in range(wanted, -1, -1):
            if index in needed:
                needed |= stages[index].needs
        self._warn_of_unused()
        return Checked(tuple(stages[index] for index in sorted(needed)), dict(self._arguments), tuple(self._warnings))

    def _check_names(self) -> None:
        seen: dict[str, Place] = {}
        for stage in self._dockerfile.stages:
            if stage.name in seen:
                reason = f"there is a stage {shown(stage.name)} already, in line {seen[stage.name].line}"
                raise refusal(stage.place, reason, "Give each stage a name of its own.")
            if stage.name:
                seen[stage.name] = stage.place

    def _read_arguments(self) -> None:
        """Give the arguments before the first FROM their values, one after another."""
        self._arguments |= {name: value for name, value in self._given.items() if name in self._arguments}
        for argument in self._dockerfile.arguments:
            for name, default in argument.names:
                value = self._given.get(name)
                if value is None and default is not None:
                    value = self._expanded(default, argument.place)
                if value is not None:
                    self._arguments[name] = value

    def _expanded(self, word: str, place: Place) -> str:
        try:
            return expand(word, self._arguments, self._dockerfile.escape)
        except SubstitutionError as error:
            raise refusal(place, f"{shown(word)}: {error}", "Correct the substitution.") from None

    def _target(self, target: str) -> int:
        stages = self._dockerfile.stages
        if not target:
            return len(stages) - 1
        index = find_stage(self._dockerfile, target, len(stages))
        if index is None:
            meant = nearest(target.lower(), [stage.name for stage in stages])
            names = ", ".join(stage.name for stage in stages if stage.name)
            hint = f"Did you mean {meant}?" if meant else f"There are {names}." if names else "No stage has a name."
            raise refusal(
                Place(self._dockerfile.name, stages[-1].place.line), f"there is no stage {shown(target)}", hint
            )
        return index

    def _stage(self, index: int, stage: Stage) -> CheckedStage:
        base = self._expanded(stage.base, stage.place)
        if not base:
            reason = f"{shown(stage.base)} is empty"
            raise refusal(stage.place, reason, "Give the ARG before it a default, or use --build-arg.")
        self._check_platform(stage)
        number = None if base.isdecimal() else find_stage(self._dockerfile, base, index)
        if number is None and any(later.name == base.lower() for later in self._dockerfile.stages[index + 1 :]):
            raise refusal(stage.place, f"the stage {shown(base)} comes later", "Move it before this one.")
        needs = {number} if number is not None else set()
        for instruction in stage.instructions:
            needs |= self._instruction(instruction, index)
        return CheckedStage(index, stage, "" if number is not None else base, number, frozenset(needs))

    def _check_platform(self, stage: Stage) -> None:
        if not stage.platform:
            return
        wanted = self._expanded(stage.platform, stage.place)
        if wanted.lower() not in ("", machine_platform()):
            reason = f"--platform={shown(wanted)} is not the platform of this machine"
            raise refusal(stage.place, reason, f"Remove it; this machine builds for {machine_platform()}.")

    def _instruction(self, instruction: Instruction, index: int) -> set[int]:
        """Check an instruction. Returns the stages of which it uses files."""
        check_substitutions(instruction, self._dockerfile.escape)
        match instruction:
            case Copy():
                return self._copy(instruction, index)
            case Run():
                return {
                    stage
                    for mount in instruction.mounts
                    for stage in self._source(mount.source_stage, instruction.place, index, "from")
                }
        return set()

    def _copy(self, copy: Copy, index: int) -> set[int]:
        if copy.parents:
            raise refusal(copy.place, "--parents is not supported", "Copy each directory to its own target.")
        if copy.is_add:
            self._check_urls(copy)
        if not copy.sources and not copy.heredocs:
            raise refusal(copy.place, "there is nothing to copy", "Write COPY SOURCE… TARGET.")
        if copy.mode and "$" not in copy.mode and not _MODE.fullmatch(copy.mode):
            raise refusal(copy.place, f"--chmod={shown(copy.mode)} is not a mode", "Write octal digits: --chmod=755.")
        return set(self._source(copy.source_stage, copy.place, index, "--from"))

    def _check_urls(self, add: Copy) -> None:
        for source in add.sources:
            if not _URL.match(source.strip("\"'")):
                if add.checksum:
                    raise refusal(add.place, "--checksum is for URLs", "Remove it.")
                continue
            if not source.lower().startswith(("http://", "https://")) or source.split("#")[0].endswith(".git"):
                hint = "Clone it in a RUN, or before the build, and COPY it."
                raise refusal(add.place, f"ADD of a repository is not supported: {shown(source)}", hint)
            if not self._allows_url(source):
                hint = "Allow its host with --network, or download it before the build and COPY it."
                raise refusal(add.place, f"the policy of this build does not allow {shown(source)}", hint)

    def _source(self, name: str, place: Place, index: int, option: str) -> Iterator[int]:
        """Return the stage of that name, if it is one; other names are those of images."""
        if not name:
            return
        if "$" in name:
            hint = "Begin a stage with FROM $IMAGE AS NAME, and copy from NAME."
            raise refusal(place, f"{option} cannot have a variable: {shown(name)}", hint)
        found = find_stage(self._dockerfile, name, index)
        if found is not None:
            yield found
            return
        stages = self._dockerfile.stages
        if name.isascii() and name.isdecimal():
            hint = f"Stages before this one have the numbers 0 to {index - 1}." if index else "This is the first stage."
            raise refusal(place, f"there is no stage {shown(name)} before this one", hint)
        if name.lower() == stages[index].name:
            raise refusal(place, f"the stage {shown(name)} uses itself", "Name an earlier stage.")
        if any(stage.name == name.lower() for stage in stages[index + 1 :]):
            raise refusal(place, f"the stage {shown(name)} comes later", "Move it before the stage that uses it.")

    def _warn_of_unused(self) -> None:
        declared = {name for argument in self._all_arguments() for name, _ in argument.names}
        for name in self._given:
            if name in declared or name in _ALWAYS_KNOWN or name in self._arguments:
                continue
            meant = nearest(name, declared)
            self._warnings.append(
                f"the build argument {shown(name)} is not used{f'; did you mean {meant}?' if meant else ''}"
            )

    def _all_arguments(self) -> Iterator[Arg]:
        yield from self._dockerfile.arguments
        for stage in self._dockerfile.stages:
            yield from (each for each in stage.instructions if isinstance(each, Arg))
