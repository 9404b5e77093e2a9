"""The time from the start of a policy's process to its first action, with empty and with filled caches. `python -m
vla_accel.measure.start` is such a process: it reads what to start as JSON on stdin and prints the seconds."""

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

from vla_accel.config import PolicyConfig
from vla_accel.config.mapping import from_mapping
from vla_accel.errors import EngineError

_CHUNK = 16 << 20


def starts(config: PolicyConfig, source: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of two starts by phase: `cold` (no compiled kernels, engines, tuning results or Python bytecode) and
    `warm` (those of the cold one); `file_read`: reading the weights alone. All read the weights from the page cache.

    `source`: {"checkpoint": …}, or {"family", "views", "horizon"} for random weights, which are written to a file
    first. Raises EngineError if a start fails.
    """
    with tempfile.TemporaryDirectory(prefix="vla_accel_start_") as folder:
        cache = Path(folder, "cache")
        cache.mkdir()
        if "checkpoint" in source:
            from vla_accel.families.loading import base_and_lora

            weights = base_and_lora(source["checkpoint"])[0]
        else:
            weights = Path(folder, "weights")
            source = {**source, "weights": str(weights)}
            _process("write", config, source, Path(folder, "others"))
        read = _read(weights)
        cold, warm = (_process("start", config, source, cache) for _ in range(2))
    return {"cold": cold, "warm": warm, "file_read": read}


def _read(folder: Path) -> float:
    """Seconds to read the weights, the second time."""
    read = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for file in sorted(folder.glob("model*.safetensors")):
            with open(file, "rb", buffering=0) as opened:
                while opened.read(_CHUNK):
                    pass
        read = time.perf_counter() - began
    return read


def _process(what: str, config: PolicyConfig, source: Mapping[str, Any], cache: Path) -> dict[str, float]:
    # What starts later must find what this one leaves, and nothing else.
    caches = {"XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": f"{cache}/triton", "PYTHONPYCACHEPREFIX": f"{cache}/py"}
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | caches
    request = {"what": what, "config": asdict(config), "source": dict(source), "began": time.time()}
    command = [sys.executable, "-m", "vla_accel.measure.start"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise EngineError(f"start: the process that was to be timed failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _write(config: PolicyConfig, source: Mapping[str, Any]) -> None:
    """Random weights, as a policy of this configuration reads them, and the scales that it needs."""
    from vla_accel.checkpoints.checkpoint import save_checkpoint
    from vla_accel.families.bench import bench_card
    from vla_accel.families.family import family_named
    from vla_accel.machine import resolve_device
    from vla_accel.measure.random_policy import calibrate_on_noise
    from vla_accel.numeric import resolve_dtype

    family, device = family_named(source["family"]), resolve_device(config.device)
    dtype = resolve_dtype(config.precision, device)
    card, folder = bench_card(family), Path(source["weights"])
    sizes = card.published(source["horizon"])
    model = card.random(sizes, seed=0, device=str(device), dtype=dtype).whole()
    folder.mkdir()
    save_checkpoint(model.state_dict(), sizes, folder, family.name)
    if family.capabilities.needs_scales(config.specs(family.parts)):
        transforms = card.dummy(sizes, source["views"])
        calibrate_on_noise(family, model.placed(None, dtype), transforms).save(folder)


def _begin(config: PolicyConfig, source: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """A policy that is ready, and what its start took."""
    from vla_accel.checkpoints.checkpoint import fitted_own
    from vla_accel.families.bench import bench_card
    from vla_accel.families.family import family_named
    from vla_accel.fp8 import read_scales
    from vla_accel.kernels.phases import recorded
    from vla_accel.measure.random_policy import random_policy
    from vla_accel.policy import OptimizedPolicy

    if "checkpoint" in source:
        policy = OptimizedPolicy.from_pretrained(source["checkpoint"], config)
        return policy, policy.start or {}
    with recorded() as spent:
        folder, family = Path(source["weights"]), family_named(source["family"])
        network = family.network_class.empty(bench_card(family).published(source["horizon"]))
        model, scales = fitted_own(network, folder), read_scales(folder)
        policy, _ = random_policy(family, config, views=source["views"], model=model, scales=scales)
        policy.warm_up()
    return policy, spent.described


def main() -> None:
    """Start a policy once, or write the checkpoint that starts read, as the JSON on stdin says."""
    request = json.loads(sys.stdin.read())
    config, source = from_mapping(PolicyConfig, request["config"]), request["source"]
    if request["what"] == "write":
        _write(config, source)
        print("{}")
        return
    import vla_accel.policy  # noqa: F401 - so that importing it counts as such

    imported = time.time() - request["began"]
    policy, phases = _begin(config, source)
    policy.infer(policy.processor.example())
    first = time.time() - request["began"]
    print(json.dumps({"import": imported, **phases, "first_action": first}))


if __name__ == "__main__":
    main()
