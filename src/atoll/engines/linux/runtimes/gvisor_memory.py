"""The format of saved memory, which every engine of this family exports and imports with its snapshots."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GvisorMemory:
    """The format of gVisor's saved memory. It is the only `MemoryFormat`."""

    data_dir: Path

    @property
    def runtime(self) -> str:
        return "runsc"

    def version(self) -> str:
        from atoll.engines.linux.runtimes import oci_runtimes  # `native` needs it for nothing else

        return oci_runtimes.version_of(oci_runtimes.find("gvisor", self.data_dir).program)

    def program_stamp(self) -> str:
        from atoll.engines.linux.runtimes import oci_runtimes  # see above

        program = oci_runtimes.find("gvisor", self.data_dir).program
        info = os.stat(program)
        return f"{program} {info.st_ino} {info.st_size} {info.st_mtime_ns}"
