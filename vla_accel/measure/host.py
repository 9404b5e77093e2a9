"""The load of other processes while something is timed, which slows code that waits for the host."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUIET = 0.1
"""Share of the cores that other processes may keep busy without a warning."""


def busy_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds of all cores together that were not idle, since the machine started; None where no one tells."""
    try:
        user, nice, system, _, _, irq, soft, *_ = map(int, stat.read_text().split(maxsplit=11)[1:-1])
    except OSError:
        return None
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


class Others:
    """What other processes do from its making on."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), busy_s(), time.process_time()

    def cores(self) -> float | None:
        """How many cores they kept busy on average; None where no one tells."""
        busy, seconds = busy_s(), time.perf_counter() - self._start
        if busy is None or self._busy is None:
            return None
        return max(0.0, busy - self._busy - (time.process_time() - self._own)) / max(seconds, 1e-9)


def busy_host(host: Mapping[str, Any]) -> str:
    """Return a warning about a report's `host` (`cores`; `others_busy`, cores busy with other processes), or ""."""
    if not host or host["others_busy"] is None or host["others_busy"] <= QUIET * host["cores"]:
        return ""
    return (
        f"other processes kept {host['others_busy']:.1f} of {host['cores']} cores busy during the run, so "
        "CPU-bound calls were slower than on a quiet machine"
    )
