"""Run an exported policy on its example and compare the actions: python run.py. Needs numpy and torch."""

import json
import sys
from pathlib import Path

import numpy as np
import torch


class Exported:
    """The components of a policy, one after the other; they join by the names of their inputs and outputs."""

    def __init__(self, folder):
        self.manifest = json.loads((Path(folder) / "manifest.json").read_text())
        files = [Path(folder) / part["file"] for part in self.manifest["components"]]
        self.programs = [torch.export.load(file).module() for file in files]

    def run(self, inputs):
        """Normalized actions (batch, horizon, action_dim) of the inputs that the manifest lists."""
        values = {name: torch.from_numpy(value) for name, value in inputs.items()}
        for part, program in zip(self.manifest["components"], self.programs, strict=True):
            with torch.inference_mode():
                results = program(*(values[one["name"]] for one in part["inputs"]))
            results = results if isinstance(results, tuple) else (results,)
            values.update(zip((one["name"] for one in part["outputs"]), results, strict=True))
        return values[self.manifest["result"]].numpy()


if __name__ == "__main__":
    folder = Path(__file__).parent
    example = dict(np.load(folder / "example.npz"))
    expected = example.pop("expected")
    difference = np.abs(Exported(folder).run(example) - expected).max()
    print(f"largest difference of the actions: {difference:.2e}, of values up to {np.abs(expected).max():.2f}")
    sys.exit(not difference < 1e-3)
