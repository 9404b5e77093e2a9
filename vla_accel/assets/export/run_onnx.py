"""Run an exported policy on its example and compare the actions: python run.py. Needs numpy and onnxruntime."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

WANTED = ("CUDAExecutionProvider", "CPUExecutionProvider")


class Exported:
    """The components of a policy, one after the other; they join by the names of their inputs and outputs."""

    def __init__(self, folder):
        self.manifest = json.loads((Path(folder) / "manifest.json").read_text())
        providers = [name for name in WANTED if name in onnxruntime.get_available_providers()]
        files = [str(Path(folder) / part["file"]) for part in self.manifest["components"]]
        self.sessions = [onnxruntime.InferenceSession(file, providers=providers) for file in files]

    def run(self, inputs):
        """Normalized actions (batch, horizon, action_dim) of the inputs that the manifest lists."""
        values = dict(inputs)
        for session in self.sessions:
            outputs = [output.name for output in session.get_outputs()]
            feeds = {one.name: values[one.name] for one in session.get_inputs()}
            values.update(zip(outputs, session.run(outputs, feeds), strict=True))
        return values[self.manifest["result"]]


if __name__ == "__main__":
    folder = Path(__file__).parent
    example = dict(np.load(folder / "example.npz"))
    expected = example.pop("expected")
    difference = np.abs(Exported(folder).run(example) - expected).max()
    print(f"largest difference of the actions: {difference:.2e}, of values up to {np.abs(expected).max():.2f}")
    sys.exit(not difference < 1e-3)
