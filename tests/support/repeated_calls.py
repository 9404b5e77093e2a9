"""`python -m tests.support.repeated_calls [measured]`: a digest of the bundled checkpoint's actions for each of three
configurations with `deterministic: true`, one JSON line. `measured`: after a policy that measures its ways, so that
they are known to the process and lie in its cache, which XDG_CACHE_HOME names."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace

from tests.support.gpu_policies import DEVICE, demo_observation, noise_for
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config

CONFIGS = ("native", "native_fp8", "benchmarks/configs/native_portable.yaml")
CALLS = 20


def digests(policy: OptimizedPolicy) -> list[str]:
    """Of each of `CALLS` rounds: with given noise, one and two in a call, and with noise of the seed."""
    found = []
    observations = [demo_observation(policy, seed) for seed in range(3)]
    for _ in range(CALLS):
        policy.reset()
        results = [policy.infer(one, noise=noise_for(policy, 1)[0]) for one in observations]
        results += [policy.infer(observations[0]), *policy.infer_batch(observations[:2], noise=noise_for(policy, 2))]
        found.append(hashlib.sha256(b"".join(result["actions"].tobytes() for result in results)).hexdigest())
    return found


def main(measured: bool) -> None:
    told = {}
    for name in CONFIGS:
        config: PolicyConfig = replace(load_config(name), device=DEVICE, num_steps=3, strict=True)
        if measured:
            OptimizedPolicy.from_pretrained("demo", config)
        told[name] = digests(OptimizedPolicy.from_pretrained("demo", replace(config, deterministic=True)))
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:] == ["measured"])
