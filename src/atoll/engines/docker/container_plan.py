"""The container of a sandbox, as a pure function from a spec to the request that creates the container.

Docker's own barriers stay in place: its namespaces, its read-only parts of /proc, its device list, and its user
namespace where the Docker engine has one (`userns-remap`, rootless). Atoll adds the following:

* All Linux capabilities are dropped except those that package managers and `su` inside need on the sandbox's own files,
  processes and ports. None of them reaches outside the container's namespaces. No program gets more, set-uid or not.
* Atoll's own system call filter refuses more than Docker's, and its own list of hidden paths in /proc and /sys reveals
  less about the machine. With a writable volume, no file can become set-uid or set-gid: root inside may be root of the
  host, and a file of the volume could not be told from another.
* Swap is disabled, because memory that may be swapped is not limited. Core dumps are off.
* The only network is loopback. If the policy allows more, a link to Atoll's gateway is added (`container_link.py`). The
  name server of that link is configured from the start; without a link it cannot be reached.
* The agent is PID 1 and runs from a volume that is read-only inside. It ends when the sandbox's lifetime is over, and
  everything inside ends with it, even if no process of Atoll is running any more. Its socket is in a tmpfs of 64 KiB
  that only root inside can open, so nothing of the host is mounted for it.
* The image's own entry point, user and health check are ignored: nothing of the image runs unless it is requested.
* The log, which only the agent could write to, has a maximum size.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.engines.docker.api.facts import ARCHITECTURES, Facts, has_own_kernel, is_gvisor, isolation_of
from atoll.engines.docker.api.image_pull import Image
from atoll.engines.docker.connect import agent_volume
from atoll.engines.enforcement import limit_details
from atoll.engines.host.confinement.masks import masked_paths
from atoll.engines.host.confinement.seccomp import Match, Rule, SetId, profile
from atoll.engines.host.environment import clean_environment
from atoll.errors import SpecError
from atoll.model import EffectiveLimits, Limits, SandboxSpec, Volume
from atoll.model.handle import IMAGE as DEFAULTS_OF_IMAGE
from atoll.model.handle import ISOLATION
from atoll.model.network_policy import without_secrets
from atoll.network.authority import BUNDLE, VARIABLES
from atoll.network.client import NAME_SERVER

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
INSTALLATION, SANDBOX, SPEC, CREATED = "atoll.installation", "atoll.sandbox_id", "atoll.spec", "atoll.created_at"
GIVEN, LEFT_OUT = "atoll.default_limits", "atoll.limits_left_out"
LEVEL = "atoll.isolation"
VOLUME, VOLUME_OWNER = "atoll.volume", "atoll.volume_owner"
IMAGE = "atoll.image"
"""The label with the `ImageDefaults` in JSON."""
_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_RESERVED = (agent_volume.HOME, "/proc", "/sys", "/dev")
_LOG = {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}}


@dataclass(frozen=True, slots=True)
class Identity:
    """The installation and the id of a sandbox, from which its container gets its name."""

    installation: str
    sandbox_id: str

    @property
    def container(self) -> str:
        """The name of the sandbox's container. The Docker engine refuses to use a name twice."""
        return f"atoll-{self.installation[:8]}-{self.sandbox_id}"


def identity(installation: str, sandbox_id: str) -> Identity:
    """Return the identity of a sandbox. Raises SpecError if the id cannot be part of a container's name."""
    if not _ID.fullmatch(sandbox_id):
        raise SpecError(
            f"{sandbox_id[:80]!r} cannot be the name of a sandbox",
            hint="Use up to 40 lower-case letters, digits, '-' and '_', beginning with a letter or digit.",
        )
    return Identity(installation, sandbox_id)


def check(spec: SandboxSpec, private: list[str]) -> None:
    """Raise SpecError for paths that would weaken the isolation. `private` are paths of the host."""
    targets = [volume.path for volume in spec.volumes]
    for target in [spec.directory, *targets]:
        if target == "/" or any(_is_inside(target, place) or _is_inside(place, target) for place in _RESERVED):
            raise SpecError(
                f"'{target}' in the sandbox is reserved", hint=f"Choose a path outside {', '.join(_RESERVED)}."
            )
    if len(set(targets)) != len(targets):
        raise SpecError("two volumes have the same path in the sandbox")
    for volume in spec.volumes:
        if volume.name:
            continue
        source = os.path.realpath(volume.host)
        for path in private:
            if _is_inside(source, path) or _is_inside(path, source):
                raise SpecError(
                    f"the volume '{volume.host}' would show '{path}', and with it other sandboxes or the host itself"
                )


def check_set_id(spec: SandboxSpec, runtime: str) -> None:
    """Raise SpecError for a writable volume where the system call filter, which prevents set-uid files on it, has no
    effect."""
    if spec.has_writable_volume and has_own_kernel(runtime):
        raise SpecError(
            f"under {runtime} the Docker engine cannot keep set-uid programs off a writable volume",
            hint="Mount it read-only, or choose engine 'oci' with isolation 'gvisor'.",
        )


def container(
    who: Identity,
    spec: SandboxSpec,
    facts: Facts,
    image: Image,
    agent: agent_volume.Agent,
    created_at: float,
    trusted: Path | None = None,
    labels: Mapping[str, str] | None = None,
    defaults: EffectiveLimits | None = None,
    cgroup_parent: str = "",
) -> dict[str, Any]:
    """Return the body of the request that creates the container. `trusted` is a file with the certificates that the
    container has to trust, if not those of its image; `defaults` are limits that the spec does not name."""
    asked, defaults = spec, defaults or EffectiveLimits(Limits())
    spec = spec.model_copy(update={"limits": spec.limits.over(defaults.limits)})
    argv = [agent_volume.PROGRAM, "--listen-path", agent_volume.SOCKET, "--work-dir", spec.directory]
    if spec.limits.open_files is not None:
        argv += ["--rlimit-nofile", str(spec.limits.open_files)]
    if spec.limits.lifetime_s is not None:
        argv += ["--lifetime-ms", str(max(1, round(spec.limits.lifetime_s * 1000)))]
    if is_gvisor(facts.runtime(spec)):
        argv.append("--gvisor")
    return {
        "Image": image.id,
        "Hostname": spec.hostname,
        "User": "0:0",
        "Entrypoint": argv,
        "Cmd": [],
        "WorkingDir": spec.directory,
        "Env": [f"{name}={value}" for name, value in _environment(who, spec, image, trusted).items()],
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": {
            INSTALLATION: who.installation,
            SANDBOX: who.sandbox_id,
            SPEC: asked.model_copy(update={"network": without_secrets(spec.network)}).model_dump_json(),
            CREATED: repr(created_at),
            GIVEN: defaults.limits.model_dump_json(exclude_none=True),
            LEFT_OUT: " ".join(defaults.left_out),
            IMAGE: image.defaults.shortened().model_dump_json(),
            LEVEL: isolation_of(facts.runtime(spec)),
            **(labels or {}),
        },
        "HostConfig": _host_config(who, spec, facts, agent, trusted, image)
        | ({"CgroupParent": cgroup_parent} if cgroup_parent else {}),
    }


def defaults_of(labels: Mapping[str, str]) -> EffectiveLimits | None:
    """Return the default limits that a container was created with; None if it was created before default limits
    existed."""
    try:
        return EffectiveLimits(Limits.model_validate_json(labels[GIVEN]), tuple(labels.get(LEFT_OUT, "").split()))
    except (KeyError, ValueError):
        return None


def details_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return what the labels of a container say about its sandbox, as details of a handle."""
    given = defaults_of(labels)
    level = {ISOLATION: str(labels[LEVEL])} if LEVEL in labels else {}  # containers of earlier versions lack it
    image = {DEFAULTS_OF_IMAGE: str(labels[IMAGE])} if IMAGE in labels else {}
    return {**(limit_details(given) if given is not None else {}), **level, **image}


def _host_config(
    who: Identity, spec: SandboxSpec, facts: Facts, agent: agent_volume.Agent, trusted: Path | None, image: Image
) -> dict[str, Any]:
    limits = spec.limits
    config: dict[str, Any] = {
        "Runtime": facts.runtime(spec),
        "NetworkMode": "none",  # a bridge would reach the host and its private networks
        "Dns": [NAME_SERVER],
        "DnsOptions": ["timeout:5", "attempts:2"],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": [
            "no-new-privileges:true",
            f"seccomp={seccomp_option(facts.architecture, _set_id(spec))}",
        ],
        "MaskedPaths": list(masked_paths(facts.processors)),
        "Mounts": [_agent_mount(agent), *_trusted_mount(trusted), *_mounts(who, spec)],
        "Tmpfs": {agent_volume.RUN: "rw,noexec,nosuid,nodev,size=64k,mode=0700"},
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        "LogConfig": _LOG,
        "RestartPolicy": {"Name": "no"},
    }
    config |= limit_options(limits)
    if limits.shm_bytes is not None:
        config["ShmSize"] = limits.shm_bytes
    if limits.disk_bytes is not None:
        config["StorageOpt"] = {"size": str(facts.storage.size(limits.disk_bytes, image.size_bytes))}
    return config


def limit_options(limits: Limits) -> dict[str, Any]:
    """Return the limits that the Docker engine can also change later, in the words of its API."""
    found: dict[str, Any] = {}
    if limits.memory_bytes is not None:
        found |= {"Memory": limits.memory_bytes, "MemorySwap": limits.memory_bytes}
    if limits.cpus is not None:
        found["NanoCpus"] = int(limits.cpus * 1e9)
    if limits.pids is not None:
        found["PidsLimit"] = limits.pids
    return found


def _set_id(spec: SandboxSpec) -> SetId:
    """Where the sandbox may write to a directory of the host, a file that becomes set-uid could be one of the host's. A
    named volume is in a directory of the Docker engine, which only root can enter."""
    return "refused" if spec.has_writable_volume else "contained" if spec.volumes else "allowed"


def _agent_mount(agent: agent_volume.Agent) -> dict[str, Any]:
    return {
        "Type": "volume",
        "Source": agent.volume,
        "Target": agent_volume.HOME,
        "ReadOnly": True,
        "VolumeOptions": {"NoCopy": True},
    }


def _trusted_mount(path: Path | None) -> list[dict[str, Any]]:
    return [{"Type": "bind", "Source": str(path), "Target": BUNDLE, "ReadOnly": True}] if path is not None else []


def volume_id(installation: str, owner: str, name: str) -> str:
    """Return the name that a named volume has in the Docker engine."""
    whose = hashlib.sha256(owner.encode()).hexdigest()[:16]
    return f"atoll-{installation[:8]}-{whose}-{name.replace('@', '_')}"


def volume_labels(installation: str, owner: str, name: str) -> dict[str, str]:
    return {INSTALLATION: installation, VOLUME: name, VOLUME_OWNER: owner}


def _mounts(who: Identity, spec: SandboxSpec) -> list[dict[str, Any]]:
    return [_named(who, spec.owner, volume) if volume.name else _mount(volume) for volume in spec.volumes]


def _named(who: Identity, owner: str, volume: Volume) -> dict[str, Any]:
    """Return the mount of a named volume, which the Docker engine makes if it is missing."""
    return {
        "Type": "volume",
        "Source": volume_id(who.installation, owner, volume.name),
        "Target": volume.path,
        "ReadOnly": volume.read_only,
        "VolumeOptions": {"NoCopy": True, "Labels": volume_labels(who.installation, owner, volume.name)},
    }


def _mount(volume: Volume) -> dict[str, Any]:
    # Older engines leave mounts below a read-only directory writable, so such mounts are not shown at all.
    options = {"Propagation": "rprivate", "NonRecursive": volume.read_only}
    return {
        "Type": "bind",
        "Source": volume.host,
        "Target": volume.path,
        "ReadOnly": volume.read_only,
        "BindOptions": options,
    }


def _environment(who: Identity, spec: SandboxSpec, image: Image, trusted: Path | None) -> dict[str, str]:
    """Return Atoll's defaults, overridden by the image's variables, overridden by the spec's."""
    ours = clean_environment(who.sandbox_id, spec, "/root", "root")
    trust = VARIABLES if trusted is not None else {}
    return {**ours, **image.env, **trust, **spec.env, "ATOLL_SANDBOX_ID": who.sandbox_id}


def _is_inside(path: str, directory: str) -> bool:
    return posixpath.normpath(path) == directory or path.startswith(directory.rstrip("/") + "/")


@functools.cache
def seccomp_option(architecture: str, set_id: SetId = "allowed") -> str:
    """Return our seccomp profile in the format of the Docker API, which is nearly that of an OCI bundle.

    `architecture` is the name that `uname -m` prints.
    """
    chosen = profile(set_id)
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "defaultErrnoRet": chosen.default_error,
            "architectures": [ARCHITECTURES[architecture]],
            "syscalls": [_rule(rule) for rule in chosen.rules],
        },
        separators=(",", ":"),
    )


def _rule(rule: Rule) -> dict[str, Any]:
    found: dict[str, Any] = {"names": list(rule.names), "action": "SCMP_ACT_ALLOW"}
    if rule.error is not None:
        found |= {"action": "SCMP_ACT_ERRNO", "errnoRet": rule.error}
    if rule.matches:
        found["args"] = [_match(match) for match in rule.matches]
    return found


def _match(match: Match) -> dict[str, Any]:
    return {"index": match.index, "value": match.mask, "valueTwo": match.value, "op": "SCMP_CMP_MASKED_EQ"}
