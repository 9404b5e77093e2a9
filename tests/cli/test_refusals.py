"""Unusable options: one line that names the option, before anything is loaded or written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from vla_accel.cli import build, build_images, main

VAE = "build-vae --vae tiny-sd-vae --output-dir"
REFUSED = [
    ("bench demo --calls 0", "calls: expected at least 1, got 0"),
    ("bench demo --profile", "profile: expected a GPU"),
    ("bench demo --hz 0", "hz: expected more than 0, got 0.0"),
    ("bench demo --prompt-tokens 0", "prompt-tokens: expected at least 1"),
    ("bench --model pi05 --views 0", "views: expected at least 1"),
    ("bench --model pi05 --config native", "config: expected a checkpoint with it"),
    ("bench demo --config native,", "config: expected a file or one of"),
    ("bench demo --config native_fp9", "config: expected a file or one of auto, .*: did you mean native_fp8"),
    ("bench demo --output /proc/a.json", "output: /proc/a.json cannot be written"),
    ("bench demo --camera 480", "camera: expected height and width such as 480x640, got '480'"),
    ("bench --model pi05 --systems eager,openpi-eager --camera 48x64", "camera: expected .*, got openpi-eager"),
    *((f"{command} ''", "checkpoint: expected a folder or .*, got ''$") for command in ("serve", "parity", "bench")),
    ("bench ./no/such/folder", "checkpoint: expected a folder or one of demo"),
    ("bench a.yaml", "checkpoint: expected a folder or a name, got a.yaml: type --config a.yaml"),
    ("bench demo --model pi05", "model: expected none with checkpoint demo, got pi05"),
    ("bench demo --systems eager", "systems: expected none with checkpoint demo; use --config, got eager"),
    ("bench demo --views 2", "views: expected none with checkpoint demo"),
    ("bench demo --horizon 2", "horizon: expected none with checkpoint demo"),
    ("bench demo --realtime-vla .", "realtime_vla: expected none with checkpoint demo"),
    ("parity demo --seed -1", "seed: expected 0 to"),
    *(
        (
            f"{command} demo --schedule cubics",
            "schedule: expected one of uniform, cubic, got 'cubics': did you mean cubic",
        )
        for command in ("parity", "serve", "tune --quick", "bench-server", "bench")
    ),
    *(
        (f"{command} demo --schedule 1,x,0", "schedule: expected numbers with commas, such as .*, got '1,x,0'")
        for command in ("parity", "bench")
    ),
    ("serve demo --num-steps 5 --schedule 1,0.3,0.01,0", "schedule: expected 6 times for 5 steps, got 4"),
    ("bench demo --steps 5 --schedule 1,0.3,0.01,0", "schedule: expected 6 times for 5 steps, got 4"),
    (
        "tune demo --quick --benchmark libero --allow-steps 2 --schedule 1,0.3,0.01,0",
        "schedule: expected 3 times for 2",
    ),
    ("parity demo --draws 0", "draws: expected at least 1, got 0"),
    ("parity demo --threshold nan", "threshold: expected -1 to 1, got nan"),
    ("parity demo --report /proc/a.html", "report: /proc/a.html cannot be written"),
    ("parity demo --model pi05", "model: expected no checkpoint with it, got demo"),
    ("parity b.npz", "checkpoint: expected a folder or a name, got b.npz: type --observations b.npz"),
    ("calibrate demo --count -1", "count: expected at least 1"),
    ("calibrate demo", "observations: expected --observations FILE, a recording by .*, got none"),
    ("flow demo --count 7", "observations: expected at least 8, one half to search times and one to judge them, got 7"),
    ("flow demo --steps 3,0", "steps: expected 1 to 1000, got 0"),
    ("flow demo --report x.pdf", r"report: expected a file name ending in \.html"),
    ("flow demo --output /proc/a", "output: /proc/a cannot be written"),
    ("tune demo --quick --margin -1", "margin: expected more than 0, at most 99, got -1.0"),
    ("tune demo --quick --confidence 200", "confidence: expected 50 to 99.99, got 200.0"),
    ("tune demo --quick --tasks 0", "suite, tasks: expected --benchmark with them, got 0 alone"),
    ("tune demo --quick --benchmark libero --allow-steps 0", "allow-steps: expected at least 1"),
    ("tune demo --quick --allow-steps 2", "allow-steps: expected --benchmark with it"),
    ("tune demo --quick --output /proc/a", "output: /proc/a cannot be written"),
    ("tune demo --quick --report x.pdf", r"report: expected a file name ending in \.html"),
    ("tune demo --quick --workers 2", "workers: expected --benchmark with it, got 2 alone"),
    ("tune demo --quick --no-films", "no-films: expected --benchmark with it"),
    ("tune demo --quick --episodes 50", "episodes: expected --benchmark with it"),
    ("tune demo --quick --draws 8", "draws: expected at most 1 with --quick, got 8"),
    ("tune demo --quick --calls 20", "calls: expected at most 10 with --quick, got 20"),
    ("tune demo --quick --benchmark nothing.like:this", "benchmark: expected libero or MODULE:FUNCTION"),
    ("tune demo --quick --benchmark :", "benchmark: expected libero or MODULE:FUNCTION"),
    ("tune demo --quick --benchmark .eval:f", "benchmark: expected libero or MODULE:FUNCTION"),
    ("tune demo", "observations: expected --observations FILE, a recording by .*, or --quick, got none"),
    ("build --model pi05_demo --depth 0", "depth: expected at least 1"),
    ("build demo --depth 3", "depth: expected --model with it"),
    ("build demo --model pi05_demo", "model: expected no checkpoint with it, got demo"),
    ("build demo --cache /proc/a", "cache: /proc/a cannot be written"),
    ("build demo --dry-run --manifest m.json --targets sm89", "manifest: expected no --dry-run with it"),
    ("build demo --config tensorrt --targets sm89", "targets: only tensorrt_rtx builds for other GPUs"),
    ("build demo --config tensorrt_rtx_fp8 --targets sm86", "kv_cache: torch.float8_e4m3fn needs compute"),
    ("build demo --targets sm75", "vision: torch.bfloat16 needs compute capability 8.0"),
    ("build demo --targets sm99", "vision: TensorRT-RTX does not run on compute capability 9.9"),
    ("cache list --cache nowhere", "cache: expected a folder of engines, got nowhere"),
    ("convert here there --action-horizon -1", "action-horizon: expected at least 1"),
    ("doctor --device tpu", "device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
    ("doctor --count 3", "count: expected --observations with it, got 3 alone"),
    ("doctor --config a.yaml", "config: expected a checkpoint that it belongs to, got none"),
    ("serve demo --max-payload-mib nan", "max-payload-mib: expected more than 0, got nan"),
    ("serve demo --port 99999", "port: expected 0 to 65535, got 99999"),
    ("serve demo --timeout-s 0", "timeout-s: expected more than 0, got 0.0"),
    ("serve demo --grace-s -1", "grace-s: expected at least 0, got -1.0"),
    ("serve demo --max-clients 0", "max-clients: expected at least 1"),
    ("serve demo --max-wait-ms -1", "max-wait-ms: expected at least 0, got -1.0"),
    ("serve demo --max-wait-ms 8", "max-wait-ms: expected --max-batch above 1 with it"),
    ("serve demo --max-batch 3", "max_batch: expected a power of two .*, got 3"),
    ("serve demo --max-batch 6", "max_batch: expected a power of two .*, got 6"),
    ("serve demo --port 0 --memory-budget-gib 3", r"memory-budget-gib: expected several policies \(--policy\)"),
    ("serve demo --host 999.1.1.1 --insecure", "cannot listen on 999.1.1.1:8000: "),
    ("serve demo --host 0.0.0.0", "host: 0.0.0.0 without a key"),
    ("serve demo --insecure", "insecure: expected a --host beyond this machine"),
    ("serve --host 0.0.0.0 --api-key-file key --insecure", "insecure: expected .*, got --api-key-file"),
    ("serve demo --api-key-file no/file", "api key no/file: expected a readable text file"),
    ("serve demo --tls-key key", "tls_key: expected tls_cert"),
    ("serve demo --port 0 --devices cpu --device cpu", "devices: expected --devices alone"),
    ("serve demo --port 0 --devices cpu --ray local", "devices: expected --devices alone"),
    ("serve --port 0 --policy a=eager:demo --config native", "policy: expected --policy, or a checkpoint"),
    ("serve --port 0 --policy a=eager:demo --lora adapter", "policy: expected --policy, or a checkpoint"),
    ("serve demo --port 0 --policy a=eager:demo", "policy: expected --policy, or a checkpoint"),
    ("serve ./no/folder --port 0", "checkpoint: expected a folder or one of demo"),
    ("serve demo --config native_fp9 --port 0", "config: expected a file or one of auto"),
    ("serve --port 0 --policy a=auto:demo --policy b=auto:dmeo", "checkpoint: expected a folder or one of demo"),
    ("serve demo --port 0 --devices cuda:99", "devices: expected all, or a list of "),
    ("serve a/native.yaml", "checkpoint: expected a folder or a name, .*: type --config a/native.yaml"),
    (
        "bench-server --config native",
        "config, num-steps, schedule: expected a checkpoint or --model with them, got native",
    ),
    ("bench-server --devices cpu --device cpu", "devices: expected --devices alone"),
    ("bench-server demo --model pi05", "model: expected a checkpoint or --model, got demo and pi05"),
    ("bench-server --model pi06", "model: expected one of .*, got 'pi06'"),
    ("bench-server --clients 1,0", "clients: expected at least 1, got 0"),
    ("bench-server --seconds 0", "seconds: expected more than 0, got 0.0"),
    ("bench-server a.yaml", "checkpoint: expected a folder or a name, got a.yaml: type --config a.yaml"),
    ("bench-vae --rounds 0", "rounds: expected at least 1"),
    ("bench-unet --size 63", "size: expected a multiple of 8, got 63"),
    ("bench-qwen --tiny --vae foo", "vae_type: expected one of eager, native, .*, got 'foo'"),
    ("txt2img --sd-dir random --guidance nan", "guidance: expected at least 0, got nan"),
    (f"{VAE} /proc/a", "output-dir: /proc/a cannot be written"),
    (f"{VAE} o --targets sm99", ".*TensorRT-RTX does not run on compute capability"),
    (f"{VAE} o --targets sm75 --dtype bf16", ".*torch.bfloat16 needs compute"),
    (f"{VAE} o --library tensorrt --targets sm89", "targets: only --library"),
    ("build-unet --sd-dir tiny-random --output-dir o --targets sm99", ".*TensorRT-RTX does not run on compute"),
    ("precision tiny-sd-vae --size 0", "size: expected at least 1"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_command_refuses_it_in_one_line_before_it_loads(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vla_accel.policy.OptimizedPolicy.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    for module, name in ((build, "_checkpoint"), (build_images, "load_model")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(build_images, "load_library", lambda name: None)
    if "api-key-file key" in words:
        Path("key").write_text("a secret")
    before = list(tmp_path.iterdir())
    on_cpu = ["--device", "cpu"] if words.startswith("bench ") else []
    assert main([*shlex.split(words), *on_cpu]) == 1
    out, err = capsys.readouterr()
    (line,) = [line for line in err.strip().splitlines() if "warning" not in line.lower()]
    assert re.match(f"vla-accel {words.split()[0]}: {message}", line) and not out, line
    assert list(tmp_path.iterdir()) == before
