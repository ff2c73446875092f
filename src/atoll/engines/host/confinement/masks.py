"""Files of `/proc` and `/sys` that describe the machine or reach beyond the sandbox. Engines cover them.

The list is Docker's, and adds what Docker's containers can still read: memory maps of the kernel, its configuration and
command line, disks, interrupt counts, modules. Paths of `/proc` that Docker makes read-only are covered here: nothing
inside needs `/proc/bus`, `fs`, `irq` or `sysrq-trigger`. `/proc/sys` stays readable; none of its files is writable,
because every namespace that it configures belongs to the host.
"""

from __future__ import annotations

import functools


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PROC = _words(
    """
    acpi asound buddyinfo bus cmdline config.gz consoles crypto diskstats dma driver fb fs interrupts iomem ioports irq
    kallsyms kcore key-users keys kmsg kpagecgroup kpagecount kpageflags latency_stats locks mdstat misc modules mtrr
    pagetypeinfo partitions pressure sched_debug schedstat scsi slabinfo softirqs swaps sysrq-trigger sysvipc
    timer_list timer_stats tty/driver vmallocinfo zoneinfo
    """
)

_SYS = _words(
    """
    block bus class/block class/dmi dev/block devices/system/cpu/vulnerabilities devices/virtual/block
    devices/virtual/dmi devices/virtual/powercap firmware fs hypervisor kernel module power
    """
)


@functools.cache
def masked_paths(cpus: int) -> tuple[str, ...]:
    """Return the paths to cover on a machine with this many processors."""
    thermal = (f"devices/system/cpu/cpu{number}/thermal_throttle" for number in range(cpus))
    return (*(f"/proc/{name}" for name in _PROC), *(f"/sys/{name}" for name in (*_SYS, *thermal)))
