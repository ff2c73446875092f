"""The filter of system calls, as bubblewrap takes it."""

from __future__ import annotations

import functools
import platform

from atoll.engines.host.confinement import bpf
from atoll.engines.host.confinement.seccomp import profile


@functools.cache
def rendered(*, refuses_set_id: bool) -> bytes:
    """`refuses_set_id`: no file becomes set-uid, because it could be one of the host's."""
    return bpf.assemble(profile("refused" if refuses_set_id else "allowed"), platform.machine())
