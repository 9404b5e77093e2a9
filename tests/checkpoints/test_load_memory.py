"""Loading needs little more memory than the model itself: peak resident set of a fresh process, on Linux."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.openpi_dialect import to_openpi
from tests.support.tiny import random_state
from vla_accel.families.pi0.network import Pi0Config
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.siglip import SiglipConfig

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NOT RUN: reads Linux's /proc")

# About 150 M parameters, most of them in a few large tensors, as in the real model.
CONFIG = Pi0Config(
    kind="pi05",
    vision=SiglipConfig(width=144, depth=2, mlp_dim=272, heads=2, image_size=28),
    prefix=GemmaConfig(width=1024, depth=6, mlp_dim=4096, heads=4, head_dim=128),
    expert=GemmaConfig(width=512, depth=6, mlp_dim=1024, heads=4, head_dim=128),
    vocab_size=40_000,
    action_horizon=10,
)
# VmHWM is the peak; it is reset before the load, and what is imported on the way (half of torch, for a model without
# memory) is there before.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from vla_accel.config.mapping import from_mapping
import rich.progress, safetensors
from tests.support.in_memory import load_file_or_folder, load_tensors
from vla_accel.families.pi0.network import Pi0, Pi0Config, pi05_demo

SMALL = pi05_demo(vocab_size=8)

def small():
    with torch.device("meta"):
        return Pi0(SMALL).state_dict()

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

torch.set_num_threads(1)
config = from_mapping(Pi0Config, json.loads(sys.argv[2]))
load_tensors({k: torch.zeros(v.shape) for k, v in small().items()}, SMALL, "warm")
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = load_file_or_folder(Path(sys.argv[1]), config, dtype=getattr(torch, sys.argv[3]))
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"weights": weights, "peak": status("VmHWM") - before}))
"""


def measure(path: Path, dtype: str) -> float:
    """Peak memory of loading, in units of the model's bytes."""
    from dataclasses import asdict

    command = [sys.executable, "-c", SCRIPT, str(path), json.dumps(asdict(CONFIG)), dtype]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    told = json.loads(done.stdout)
    assert told["weights"] > 250 << 20
    print(f"{path.name} as {dtype}: {told['peak'] / 2**20:.0f} MiB for {told['weights'] / 2**20:.0f} MiB of weights")
    return told["peak"] / told["weights"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {k: v.to(torch.bfloat16) for k, v in random_state(CONFIG, dtype=torch.float32).items()}
    file = tmp_path_factory.mktemp("large") / "model.safetensors"
    save_file({k: v.contiguous() for k, v in to_openpi(state, CONFIG).items()}, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory(path: Path, dtype: str) -> None:
    """Stored in bfloat16: kept so, and widened on the way."""
    assert measure(path, dtype) <= 1.2
