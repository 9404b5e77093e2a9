"""`vla-accel doctor`: engines and extras say why they cannot run here, and the self-test can fail."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from tests.support.gpus import H200, RTX_4090, assumed
from vla_accel.cli import doctor, main
from vla_accel.engines import ENGINES, tensorrt_library
from vla_accel.engines.tensorrt import TensorrtEngine, TensorrtRtxEngine
from vla_accel.errors import EngineError
from vla_accel.kernels.gpu import Gpu
from vla_accel.measure import diagnosis
from vla_accel.policy import OptimizedPolicy

GPU = torch.device("cuda")
OLD = Gpu("Tesla T4", (7, 5), 40, 64 << 10, 64 << 10, 16 << 30)


def test_the_whole_report_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "vla_accel.doctor/1" and report["passed"]
    assert report["machine"]["device"] == "cpu" and report["software"]["torch"] == torch.__version__
    assert list(report["engines"]) == list(ENGINES) and report["engines"]["eager"]["why_not"] is None
    assert "on a CUDA GPU, the device is cpu" in report["engines"]["tensorrt_rtx"]["why_not"] or (
        "no usable TensorRT-RTX" in report["engines"]["tensorrt_rtx"]["why_not"]
    )
    assert {e["component"] for e in report["self_test"]["engines"]} >= {"vision", "denoise"}
    assert report["self_test"]["cosine"] > 0.999 and report["self_test"]["seconds"] > 0
    text = "\n".join(doctor.summary(report))
    threads = report["machine"]["threads"]
    assert f", {threads} thread{'s' if threads > 1 else ''}\n" in text
    assert "eager           yes" in text and "native          no   it needs a GPU" in text
    assert doctor.verdict(report["self_test"]).startswith("  passed: ")


class Policy:
    """Answers as it was told to."""

    metadata = {"action_horizon": 2, "action_dim": 3, "engines": [{"component": "vision", "used": "native"}]}  # noqa: RUF012
    processor = type("P", (), {"example": staticmethod(dict)})

    def __init__(self, actions: Any) -> None:
        self.actions = np.asarray(actions, float)

    def infer(self, observation: Any, *, noise: np.ndarray) -> Any:
        assert noise.shape == (2, 3)
        return {"actions": self.actions}


def test_a_policy_that_does_not_agree_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def made(name: str, config: Any, *, device: str) -> Policy:
        asked.append(config)
        return Policy([1.0, 2.0, 3.0] if config == "eager_fp32" else answer)

    monkeypatch.setattr(OptimizedPolicy, "from_pretrained", made)
    answer = [1.0, 2.0, 3.001]
    assert main(["doctor"]) == 0
    assert asked == [None, "eager_fp32"] and "self-test\n  passed: native" in capsys.readouterr().out
    answer = [3.0, 2.0, 1.0]
    assert main(["doctor"]) == 1
    assert "self-test\n  FAILED: native on cpu and FP32 eager agree to a cosine of 0.714" in capsys.readouterr().out
    answer = [np.nan] * 3
    assert main(["doctor"]) == 1


def test_an_error_is_the_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def broken(*_: Any, **__: Any) -> Any:
        said.append(capsys.readouterr().out)
        raise EngineError("the driver is too old")

    monkeypatch.setattr(OptimizedPolicy, "from_pretrained", broken)
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["self_test"]["error"] == "EngineError: the driver is too old"
    assert main(["doctor"]) == 1
    assert said[-1].endswith("self-test\n"), "all else is told before the test, which may take long"
    assert capsys.readouterr().out == "  FAILED: EngineError: the driver is too old\n"


# -- engines ------------------------------------------------------------------------------------------------------


def test_tensorrt_says_which_gpu_and_which_library_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"no {name}")

    with monkeypatch.context() as patch, assumed(H200):
        patch.setattr("importlib.import_module", absent)
        assert "pip install 'vla_accel[tensorrt]'" in str(TensorrtEngine.why_not(GPU))
        assert "pip install 'vla_accel[tensorrt-rtx]'" in str(TensorrtRtxEngine.why_not(GPU))
    monkeypatch.setattr(tensorrt_library, "load_library", lambda name: None)
    with assumed(H200):
        assert TensorrtEngine.why_not(GPU) is None
        assert "does not run on compute capability 9.0; it runs on 7.5, 8.0" in str(TensorrtRtxEngine.why_not(GPU))
    with assumed(RTX_4090):
        assert TensorrtRtxEngine.why_not(GPU) is None
    assert "on a CUDA GPU, the device is cpu" in str(TensorrtEngine.why_not(torch.device("cpu")))


def test_configurations_name_the_engines_that_there_are() -> None:
    import typing

    from vla_accel.config import EngineName

    assert {*typing.get_args(EngineName)} - {"auto"} == {*ENGINES}


# -- extras and the machine ---------------------------------------------------------------------------------------


def test_what_an_extra_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ("there>=2", "old>=3,<4", "absent>=1", "opencv-python-headless>=4.9")
    texts = ["numpy>=1.26", *(f"{text}; extra == 'one'" for text in one), "also-absent; extra == 'two'"]
    texts += ["windows>=1; platform_system == 'Windows' and extra == 'one'", "vla_accel[one]; extra == 'two'"]
    needed = [*map(Requirement, texts)]
    versions = {"there": "2.0.1", "old": "2.9", "opencv-python": "4.14"}
    monkeypatch.setattr(diagnosis, "installed_version", versions.get)
    assert diagnosis.missing("one", needed) == ["old <4,>=3 (there is 2.9)", "absent"]
    assert diagnosis.missing("two", needed) == ["also-absent", "old <4,>=3 (there is 2.9)", "absent"]
    assert diagnosis.missing("none", needed) == []


def test_a_bare_checkout_knows_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PACKAGE", "not-installed-at-all")
    assert diagnosis.extras() == {} and diagnosis.libraries() == {}


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        (None, "unknown", "is a build without CUDA; there is no NVIDIA driver"),
        (None, "580.1", "there is an NVIDIA driver 580.1: pip install --force-reinstall torch"),
        ("13.0", "unknown", "sees no GPU; there is no NVIDIA driver"),
        ("13.0", "580.1", "sees no GPU; there is an NVIDIA driver 580.1 (nvidia-smi says"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: str, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(diagnosis, "driver", lambda: driver)
    assert said in str(diagnosis.why_no_gpu())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert diagnosis.why_no_gpu() is None
