"""The values that every layer shares: what a sandbox should be, what a command did, what an engine saw.

Pure: nothing here touches the machine.
"""

from atoll.model.handle import (
    DEFAULTS,
    LEFT_OUT,
    MANAGER_LABEL,
    NAME_LABEL,
    OWN_LABELS,
    EffectiveLimits,
    Handle,
    ListedSandbox,
    SandboxDetails,
    effective_limits,
    image_defaults,
)
from atoll.model.image_defaults import ImageDefaults, check_variables, default_user, resolved
from atoll.model.result import ExecutionResult
from atoll.model.spec import (
    DEFAULT_WORK_DIR,
    MAX_BYTES,
    Limits,
    SandboxSpec,
    SetupCommands,
    SetupTime,
    Size,
    UndoRule,
    UndoSetting,
    Volume,
    absolute_path,
    parse_size,
)
from atoll.model.start_plan import BUILD_LABEL, StartPlan, start_plan
from atoll.model.starting import ReadyCheck, StartCommand, StartCommands
from atoll.model.state import Capability, Cause, ImageProgress, ListeningPort, Observation, State, Stats

__all__ = [
    "BUILD_LABEL",
    "DEFAULTS",
    "DEFAULT_WORK_DIR",
    "LEFT_OUT",
    "MANAGER_LABEL",
    "MAX_BYTES",
    "NAME_LABEL",
    "OWN_LABELS",
    "Capability",
    "Cause",
    "EffectiveLimits",
    "ExecutionResult",
    "Handle",
    "ImageDefaults",
    "ImageProgress",
    "Limits",
    "ListedSandbox",
    "ListeningPort",
    "Observation",
    "ReadyCheck",
    "SandboxDetails",
    "SandboxSpec",
    "SetupCommands",
    "SetupTime",
    "Size",
    "StartCommand",
    "StartCommands",
    "StartPlan",
    "State",
    "Stats",
    "UndoRule",
    "UndoSetting",
    "Volume",
    "absolute_path",
    "check_variables",
    "default_user",
    "effective_limits",
    "image_defaults",
    "parse_size",
    "resolved",
    "start_plan",
]
