"""How long a policy takes from the start of its process to its first action: in processes of their own, first without
anything that an earlier start left behind, then with it.

`python -m vla_accel.measure.start` is such a process: it reads what to start as JSON, and prints the seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vla_accel.config import PolicyConfig, from_mapping
from vla_accel.errors import EngineError
from vla_accel.ops.phases import PHASES

__all__ = ["PHASES", "starts"]

_CHUNK = 16 << 20


def starts(config: PolicyConfig, source: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of two starts, `cold` (empty caches of compiled kernels, engines and tunings) and `warm` (those that the
    cold one left), by phase; `first_action`: from the process's start on. `file_read`: reading the checkpoint's weights
    alone, as often as it takes to have them in the page cache.

    `source`: {"checkpoint": …} or {"family", "views", "horizon"} for random weights. Files are in the page cache
    for both: the disk is another matter.
    """
    files = _files(source.get("checkpoint"))
    for _ in range(2):
        began = time.perf_counter()
        for file in files:
            with open(file, "rb", buffering=0) as opened:
                while opened.read(_CHUNK):
                    pass
        read = time.perf_counter() - began
    with tempfile.TemporaryDirectory(prefix="vla_accel_start_") as cache:
        cold, warm = (_start(config, source, cache) for _ in range(2))
    return {"cold": cold, "warm": warm, "file_read": read if files else None}


def _start(config: PolicyConfig, source: Mapping[str, Any], cache: str) -> dict[str, float]:
    # What starts later must find what this one leaves, and nothing else.
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    asked = json.dumps({"config": asdict(config), "source": dict(source), "began": time.time()})
    command = [sys.executable, "-m", "vla_accel.measure.start"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise EngineError(f"start: the process that was to be timed failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _files(checkpoint: str | None) -> list[Path]:
    if checkpoint is None:
        return []
    from vla_accel.checkpoints.loading import find

    return sorted(find(checkpoint).glob("model*.safetensors"))


def main() -> None:
    """One start, told on stdin."""
    asked = json.loads(sys.stdin.read())
    config, source = from_mapping(PolicyConfig, asked["config"]), asked["source"]
    from vla_accel.measure.random_policy import random_policy
    from vla_accel.ops.phases import recorded
    from vla_accel.policy import OptimizedPolicy

    imported = time.time() - asked["began"]
    if source.get("checkpoint"):
        policy = OptimizedPolicy.from_pretrained(source["checkpoint"], config)
        phases = policy.start or {}
    else:
        with recorded() as spent:
            policy, _ = random_policy(source["family"], config, views=source["views"], horizon=source["horizon"])
            policy.warm_up()
        phases = spent.described
    policy.infer(policy.processor.example())
    first = time.time() - asked["began"]
    print(json.dumps({"import": imported, **phases, "first_action": first}))


if __name__ == "__main__":
    main()
