"""Free and used memory of the host, for every backend that computes in it."""

import os
import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """Return the process's peak resident set; getrusage counts KiB on Linux and bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> tuple[int, str]:
    """Return the bytes that a program may take before the system swaps or kills one, and the source of this figure."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory of this machine"
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free, what = int(fields["MemAvailable"].split()[0]) * 1024, "available memory of this machine"
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        left = max(0, int(most) - int(used.read_text()))
        if left < free:
            return left, "memory that this container may still take"
    return free, what
