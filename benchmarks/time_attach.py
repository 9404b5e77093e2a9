"""Time lerobot's policies of the published size, as they are and attached to this package's engines.

    python -m benchmarks.time_attach --output runs/attach.json [--models smolvla pi05 pi05_fp32] [--calls 30]

Random weights, ten denoising steps, chunks of 50 actions, two cameras of 256 x 256. A call is `predict_action_chunk`
of a batch on the GPU, as lerobot's preprocessor leaves it, to actions on the host. Needs lerobot 0.6.1 next to this
package; the exit status is 1 if a policy could not be attached.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import vla_accel
from benchmarks.script import options_parser, report_head
from vla_accel.families.smolvla.bench import lerobot_policy
from vla_accel.files import write_json
from vla_accel.machine import resolve_device

HORIZON, STEPS, TOKENS, WARM_UP = 50, 10, 40, 5
CAMERAS = {f"observation.images.{name}": (256, 256) for name in ("image", "image2")}


def smolvla(device: str) -> Any:
    from lerobot.configs.types import FeatureType, PolicyFeature

    policy = lerobot_policy(HORIZON, device, compiled=False, steps=STEPS)
    for key, size in CAMERAS.items():
        policy.config.input_features[key] = PolicyFeature(FeatureType.VISUAL, (3, *size))
    return policy


def pi05(device: str, dtype: str = "bfloat16") -> Any:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    inputs = {key: PolicyFeature(FeatureType.VISUAL, (3, *size)) for key, size in CAMERAS.items()}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (8,))
    config = PI05Config(
        input_features=inputs, output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))}, dtype=dtype,
        chunk_size=HORIZON, n_action_steps=HORIZON, num_inference_steps=STEPS, device=device,
    )  # fmt: skip
    with torch.device(device):
        return PI05Policy(config).to(device).eval()


MODELS: dict[str, Callable[[str], Any]] = {
    "smolvla": smolvla,
    "pi05": pi05,
    "pi05_fp32": lambda device: pi05(device, "float32"),
}
"""lerobot's default for π0.5 is float32; its published checkpoints are run in either."""


def batch_of(seed: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    batch = {
        key: torch.randint(0, 256, (1, 3, *size), generator=generator, device=device).float() / 255
        for key, size in CAMERAS.items()
    }
    batch["observation.state"] = torch.randn(1, 8, generator=generator, device=device).clamp(-1, 1)
    batch["observation.language.tokens"] = torch.arange(2, TOKENS + 2, device=device)[None]
    batch["observation.language.attention_mask"] = torch.ones(1, TOKENS, dtype=torch.bool, device=device)
    return batch


def timed(policy: Any, calls: int, device: str) -> dict[str, float]:
    """Milliseconds of `calls` calls, after a warm-up."""
    found = []
    for seed in range(calls + WARM_UP):
        batch = batch_of(seed, device)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            policy.predict_action_chunk(batch).cpu()
        found.append((time.perf_counter() - begin) * 1e3)
    median, high = np.percentile(found[WARM_UP:], (50, 95))
    return {"p50_ms": float(median), "p95_ms": float(high)}


def row(name: str, calls: int, device: str) -> dict[str, Any]:
    policy = MODELS[name](device)
    parameters = sum(p.numel() for p in policy.parameters())
    found: dict[str, Any] = {"model": name, "parameters": parameters, "lerobot": timed(policy, calls, device)}
    before = torch.cuda.memory_allocated()
    attached, begin = vla_accel.attach(policy), time.perf_counter()
    policy.predict_action_chunk(batch_of(0, device))
    found["first_call_s"] = time.perf_counter() - begin
    if not attached.active or attached.engine is None:
        return {**found, "reason": attached.reason}
    found |= {"attached": timed(policy, calls, device), "difference": attached.difference}
    found["speed_up"] = found["lerobot"]["p50_ms"] / found["attached"]["p50_ms"]
    found["engines"] = attached.engine.ledger.as_list()
    found["parts_ms"] = attached.engine.latency_report()["components"]
    memory = {"lerobot": before, "attached": torch.cuda.memory_allocated()}
    del attached.engine
    attached.detach()
    return {**found, "memory": {**memory, "detached": torch.cuda.memory_allocated()}}


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--calls", type=int, default=30)
    options = parser.parse_args()
    device = resolve_device("cuda")
    rows, settings = [], {"calls": options.calls, "steps": STEPS, "horizon": HORIZON, "cameras": len(CAMERAS)}
    for name in options.models:
        rows.append(row(name, options.calls, str(device)))
        print({key: value for key, value in rows[-1].items() if key not in ("engines", "parts_ms")}, flush=True)
        write_json(options.output, {**report_head("time_attach", device), "settings": settings, "rows": rows})
        torch.cuda.empty_cache()
    return int(any("reason" in one for one in rows))


if __name__ == "__main__":
    sys.exit(main())
