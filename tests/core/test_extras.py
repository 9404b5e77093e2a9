"""Each optional extra brings all that its feature imports: tried with every other package hidden."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FEATURES = {
    "checkpoints": "import huggingface_hub, sentencepiece, tokenizers; from PIL import Image",
    "diffusion": "from vla_accel.images.models import diffusers_module; d = diffusers_module(); "
    "d.AutoencoderKLQwenImage, d.StableDiffusionPipeline, d.UNet2DConditionModel",
    "groot": "import cv2, tokenizers; from PIL import Image",
    "jax": "import jax, orbax.checkpoint",
    "onnx": "from vla_accel.nn.calibration import load_modelopt; load_modelopt()\nimport onnx, onnxruntime, onnxscript",
    "ray": "import ray",
    "report": "from vla_accel.report.charts import figure_class; figure_class()",
    "serve": "from vla_accel.server.connection import connection_class; connection_class(1, print); import msgpack; "
    "from vla_accel.server.metrics import prometheus; prometheus()",
}
HIDING = """
import importlib.machinery, sys, sysconfig, warnings
hidden, path_finder = set(sys.argv[1].split(",")), importlib.machinery.PathFinder
installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}

class Hiding(path_finder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in hidden:  # but for what a package brings in a folder of its own
            path = [folder for folder in sys.path if folder not in installed]
        return path_finder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(path_finder)] = Hiding
warnings.simplefilter("ignore")
exec(sys.argv[2])
"""


def requirements(extra: str) -> list[Requirement]:
    """The package's own dependencies and those of an extra, of pyproject.toml."""
    project = pytest.importorskip("tomllib", reason="needs Python 3.11").loads((ROOT / "pyproject.toml").read_text())
    texts = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"][extra]]
    return [Requirement(text) for text in texts]


def brought(wanted: Iterable[Requirement]) -> set[str]:
    """The distributions that an installer brings for some requirements, from the metadata of those installed."""
    found: set[str] = set()
    waiting, seen = list(wanted), set()
    while waiting:
        one = waiting.pop()
        if str(one) in seen or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(one))
        if canonicalize_name(one.name) == "vla-accel":  # an extra that brings others
            waiting += [other for extra in one.extras for other in requirements(extra)]
            continue
        try:
            needs = [Requirement(text) for text in importlib.metadata.requires(one.name) or []]
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"NOT RUN: needs {one.name}")
        found.add(canonicalize_name(one.name))
        for need in needs:
            chosen = [e for e in one.extras if need.marker is not None and need.marker.evaluate({"extra": e})]
            if need.marker is None or need.marker.evaluate({"extra": ""}) or chosen:
                need.marker = None
                waiting.append(need)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("extra", FEATURES)
def test_an_extra_brings_all_that_its_feature_imports(extra: str) -> None:
    there = brought(requirements(extra))
    hidden = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if re.fullmatch(r"\w+", module) and not {canonicalize_name(owner) for owner in owners} & {*there, "vla-accel"}
    }
    assert "pytest" in hidden and "numpy" not in hidden
    words = [sys.executable, "-c", HIDING, ",".join(sorted(hidden)), FEATURES[extra]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
