"""The layout's rules: imports run downwards only, optional packages are imported late, machine paths stay out."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = {"errors", "files", "numeric", "pictures"}
# What each part of vla_accel may import of vla_accel, besides itself and `CORE`; a part's line may be continued.
TABLE = """
errors:
files:
numeric:
pictures:
progress:
config:
fp8:
component: config fp8
ledger:
machine: kernels
runtime: kernels
latency: machine
kernels: fp8 runtime
nn: component config fp8 kernels progress runtime
engines: component config fp8 kernels ledger runtime
transforms: config
checkpoints: config nn progress transforms
families: checkpoints component config fp8 images kernels nn runtime transforms
report:
view:
remote: transforms view
client: remote transforms
server: config remote transforms view
policy: component config engines families fp8 kernels latency ledger machine nn remote runtime transforms
attachment: checkpoints config families machine nn policy transforms
measure: checkpoints client component config engines families fp8 kernels latency machine nn policy progress remote
    server transforms
tune: config engines fp8 kernels measure policy
images: component config engines kernels latency ledger nn progress runtime
cli: checkpoints config engines families images ledger machine measure policy progress report server transforms
    tune view
__main__: cli
"""
ALLOWED = {
    part: set(uses.split())
    for part, _, uses in (line.partition(":") for line in TABLE.replace("\n    ", " ").strip().splitlines())
}
# The harness sees a policy and its timings, and knows no simulator. A simulator's folder may import the harness; the
# demo's training may import both, and the model. Benchmarks may import any part of the package.
EVAL_IMPORTS = {
    "scripts": {"harness"},
    "harness": set(),
    "libero": {"harness"},
    "demo": {"harness", "libero"},
    "lerobot": {"harness", "libero"},
    "benchmarks": {"harness"},
}
EVAL_ALLOWED = {
    "scripts": {"checkpoints", "cli", "latency", "measure", "progress", "report"},
    "harness": {
        *("cli", "client", "latency", "machine", "measure", "policy", "progress", "remote", "report", "tune", "view"),
    },
    "libero": {"cli"},
    "lerobot": {"cli"},
    "demo": {
        *("checkpoints", "cli", "engines", "families", "fp8", "kernels", "machine", "measure", "nn", "policy"),
        "transforms",
    },
}
# Imported only inside functions: a robot's client, or a user without the simulator, has none of these.
OPTIONAL = {
    *("PIL", "cv2", "diffusers", "flash_attn", "huggingface_hub", "imageio", "jax", "libero", "matplotlib"),
    *("modelopt", "msgpack", "mujoco", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "orbax", "playwright"),
    *(
        "prometheus_client",
        "pynvml",
        "ray",
        "rerun",
        "robosuite",
        "sentencepiece",
        "tensorrt",
        "tensorrt_rtx",
        "tokenizers",
    ),
    *("torch_tensorrt", "transformers", "uvloop", "websockets"),
}

PACKAGE = sorted((ROOT / "vla_accel").rglob("*.py"))
EVAL = sorted((ROOT / "eval").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(p) for p in (*PACKAGE, *EVAL, *BENCHMARKS)}


@functools.cache
def imports(path: Path, *, top_only: bool = False) -> frozenset[str]:
    """Absolute names of every module imported; `from a import b` counts as a.b where that is a module."""
    found: set[str] = set()
    for node in nodes(ast.parse(path.read_text()), top_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            name = node.module or ""
            whole = {f"{name}.{alias.name}" for alias in node.names}
            found |= {w if w in MODULES else name for w in whole}
    return frozenset(found)


def nodes(tree: ast.AST, top_only: bool) -> Iterator[ast.AST]:
    """What runs when a module is imported, or all of it."""
    for node in ast.iter_child_nodes(tree):
        late = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(node)
        if not (top_only and late) and not isinstance(node, ast.expr):
            yield node
            yield from nodes(node, top_only)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def parts_used(path: Path) -> set[str]:
    """The parts of vla_accel that a file imports ("" for the package itself)."""
    names = [n.split(".") for n in imports(path) if n.split(".")[0] == "vla_accel"]
    return {n[1] if len(n) > 1 else "" for n in names}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def may_use(path: Path) -> set[str]:
    """The parts that a file of the package may import."""
    part = path.relative_to(ROOT / "vla_accel").with_suffix("").parts[0]
    if part == "__init__":
        return {"attachment", "config", "policy"}
    assert part in ALLOWED, f"vla_accel/{part} is new: give it a row here"
    # The package itself carries the version, which the breakdown and the command line name.
    return ALLOWED[part] | CORE | {part} | ({""} if part in ("machine", "cli") else set())


def test_the_package_imports_downwards() -> None:
    assert {relative(path): wrong for path in PACKAGE if (wrong := parts_used(path) - may_use(path))} == {}


def test_what_the_package_may_import_is_what_it_does_import() -> None:
    used: dict[str, set[str]] = {part: set() for part in ALLOWED}
    for path in PACKAGE:
        part = path.relative_to(ROOT / "vla_accel").with_suffix("").parts[0]
        if part != "__init__":
            used[part] |= parts_used(path) - CORE - {part, ""}
    assert used == ALLOWED


def test_the_root_holds_few_modules() -> None:
    assert len(list((ROOT / "vla_accel").glob("*.py"))) <= 13


def role_of(path: Path) -> str:
    """`harness`, `libero` or `demo`; `scripts` for the modules of eval itself; `benchmarks`."""
    part, *inner = path.relative_to(ROOT).parts
    return "benchmarks" if part == "benchmarks" else inner[0] if len(inner) > 1 else "scripts"


def test_the_harness_knows_no_benchmark() -> None:
    found = {}
    for path in (*EVAL, *BENCHMARKS):
        role, names = role_of(path), imports(path) & MODULES
        used = {role_of(ROOT / f"{n.replace('.', '/')}.py") for n in names if n.startswith(("eval.", "benchmarks."))}
        found[relative(path)] = used - {"scripts", role} - EVAL_IMPORTS[role]
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_what_eval_may_import_of_the_package_is_what_it_does_import() -> None:
    used: dict[str, set[str]] = {role: set() for role in EVAL_ALLOWED}
    for path in EVAL:
        used[role_of(path)] |= parts_used(path) - CORE
    assert used == EVAL_ALLOWED


def test_no_import_runs_in_a_circle() -> None:
    graph = {module_of(p): imports(p) & MODULES - {module_of(p), "vla_accel"} for p in (*PACKAGE, *EVAL, *BENCHMARKS)}
    # A package's __init__ only gathers its own modules, for users from outside.
    packages = {module_of(p) for p in (*PACKAGE, *EVAL, *BENCHMARKS) if p.name == "__init__.py"}
    graph = {m: {u for u in used if not (u in packages and m.startswith(u + "."))} for m, used in graph.items()}
    assert any(graph.values())
    while graph:
        leaves = {m for m, used in graph.items() if not used & graph.keys()}
        assert leaves, f"a circle within {sorted(graph)}"
        graph = {m: used for m, used in graph.items() if m not in leaves}


def test_optional_packages_are_imported_where_they_are_used() -> None:
    found = {p: {n.split(".")[0] for n in imports(p, top_only=True)} & OPTIONAL for p in (*PACKAGE, *EVAL, *BENCHMARKS)}
    for path in PACKAGE:
        found[path] |= {n.split(".")[0] for n in imports(path)} & {"eval", "benchmarks", "tests"}
    assert {relative(path): wrong for path, wrong in found.items() if wrong} == {}


def loaded_by(*statements: str) -> list[set[str]]:
    """Top-level packages in a fresh interpreter after each statement."""
    code = "import sys\n" + "".join(
        f"{statement}\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))\n" for statement in statements
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_imports_need_no_optional_packages() -> None:
    (package,) = loaded_by("import vla_accel")
    assert "vla_accel" in package and not package & (OPTIONAL | {"torch", "numpy", "yaml", "safetensors"})
    # torch brings some of these itself where they are installed.
    torch_alone, policy = loaded_by("import torch", "from vla_accel import OptimizedPolicy")
    assert "vla_accel" not in torch_alone and {"torch", "vla_accel"} <= policy
    assert not policy & (OPTIONAL - torch_alone)


def test_public_names() -> None:
    import vla_accel

    names = {name for name in vla_accel.__all__ if getattr(vla_accel, name) is not None}
    assert names == {"EngineSpec", "OptimizedPolicy", "PolicyConfig", "attach", "load_config", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Policy'"):
        _ = vla_accel.Policy


TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh", ""}
MACHINE_PATH = re.compile(r"(?<![\w.*~:/])/(?:work|home|root|mnt|scratch|Users)/\w|(?<![\w.*~:/])/tmp/\w")


def project_files() -> list[Path]:
    found = [p for p in ROOT.iterdir() if p.is_file() and not p.name.startswith(".git")]
    for folder in ("vla_accel", "eval", "benchmarks", "plugins", "tests", "docs", "configs", ".ci"):
        found += [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return sorted(p for p in found if p.suffix in TEXT)


def test_no_file_names_a_path_of_one_machine() -> None:
    for text in ("cd /work" + "/main", "'/home" + "/me/x'", "open(/tmp" + "/x)"):
        assert MACHINE_PATH.search(text), text
    for text in ("a/work/b", "https://host/home/x", "framework/", "/proc/cpuinfo"):
        assert not MACHINE_PATH.search(text), text
    files = project_files()
    assert {"pyproject.toml", "optimized.py", "simulator.py"} <= {p.name for p in files}
    lines = [
        f"{relative(p)}:{i}: {line.strip()[:100]}"
        for p in files
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not lines, "\n".join(lines)


def test_an_installed_package_has_its_data() -> None:
    """Files other than Python modules are installed only if pyproject.toml lists them."""
    import fnmatch

    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r"^\[tool\.setuptools\.package-data\]\nvla_accel = (\[.*\])$", text, re.MULTILINE)
    assert match
    package, patterns = ROOT / "vla_accel", [p.replace("**/", "*") for p in ast.literal_eval(match[1])]
    files = [p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file()]
    others = [f for f in files if not f.endswith(".py") and "__pycache__" not in f]
    # A link to the one copy of the configurations.
    others += [f"configs/{p.name}" for p in (package / "configs").iterdir()]
    assert [f for f in others if f.endswith(".cu")]
    assert [f for f in others if not any(fnmatch.fnmatch(f, p) for p in patterns)] == []
