"""The floors: what imports what, file and function sizes, and what must not be imported at all."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rljax"
# A module imports only from floors below its own. Modules on one line belong together, as those of a folder do:
# they may import each other, without a loop.
FLOORS = [
    (0, "sample.py"),
    (0, "plugins.py"),
    (0, "types.py"),
    (0, "config.py", "config_rules.py", "algo_rules.py", "knobs.py"),
    (0, "sharding.py"),
    (0, "tokenizer.py", "hub.py"),
    (0, "metrics.py", "metric_names.py", "plots.py"),
    (0, "kernels/"),
    (1, "ops.py"),
    (1, "losses.py"),
    (1, "advantages.py"),
    (1, "packing.py", "partition.py"),
    (1, "data.py", "records.py"),
    (1, "rewards/"),
    (1, "filters.py"),
    (2, "models/"),
    (2, "algorithms/"),
    (2, "optimizer.py"),
    (2, "surrogates.py"),
    (3, "sampler/"),
    (3, "trainer.py", "policy.py", "critic.py"),
    (3, "checkpoint.py"),
    (4, "rollout.py", "gather.py", "harvest.py"),
    (4, "experience.py"),
    (5, "evaluation.py", "assemble.py", "checks.py", "weights.py"),
    (6, "loop.py"),
    (7, "launch.py", "evaluate.py", "report.py"),
]


def modules():
    """Every module of the package as a path below it: `trainer.py`, `models/hf.py`. `kernels` is a link."""
    found = [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")]
    return sorted({path.relative_to(PACKAGE) for path in found})


def line_of(module):
    """The module's line of `FLOORS` (floor, names), or None."""
    name = f"{module.parts[0]}/" if len(module.parts) > 1 else module.name
    found = [line for line in FLOORS if name in line[1:]]
    assert len(found) <= 1, f"{name} stands on several lines"
    return found[0] if found else None


@functools.cache
def parsed(module):
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"))


def file_of(dotted):
    """The module of the package that a dotted name stands for, or None."""
    path = pathlib.Path(*dotted.split("."))
    found = [p for p in (path.with_suffix(".py"), path / "__init__.py") if (ROOT / p).is_file()]
    return found[0].relative_to("rljax") if path.parts[0] == "rljax" and found else None


def imports(module):
    """Modules of the package that this one imports, anywhere in its text."""
    found = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            found |= {file_of(f"{node.module}.{alias.name}") or file_of(node.module) for alias in node.names}
    return found - {module, None, pathlib.Path("__init__.py")}


def test_every_module_has_a_floor_and_every_line_a_module():
    lines = {module: line_of(module) for module in modules() if module != pathlib.Path("__init__.py")}
    assert [str(module) for module, line in lines.items() if line is None] == []
    assert [line for line in FLOORS if line not in lines.values()] == []


def test_the_readme_has_the_same_table():
    rows, inside = [], False
    for text in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if cells == ["floor", "module", "purpose"]:
            inside = True
        elif inside and not text.startswith("|"):
            break
        elif inside and cells[0].isdigit():
            rows.append((int(cells[0]), *(name.strip().strip("`") for name in cells[1].split(","))))
            assert cells[2], text
    def comparable(lines):
        return sorted((line[0], *sorted(line[1:])) for line in lines)

    assert comparable(rows) == comparable(FLOORS)


@pytest.mark.parametrize("module", [m for m in modules() if m.name != "__init__.py" or len(m.parts) > 1], ids=str)
def test_imports_go_to_floors_below(module):
    line = line_of(module)
    wrong = [str(other) for other in imports(module) if line_of(other) != line and line_of(other)[0] >= line[0]]
    assert wrong == [], f"{module} on floor {line[0]}"


@pytest.mark.parametrize("line", FLOORS, ids=lambda line: line[1])
def test_no_loops_inside_a_line(line):
    members = {module for module in modules() if line_of(module) == line}
    left = {module: imports(module) & members for module in members}
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    assert sorted(map(str, left)) == []


def test_files_and_functions_are_short():
    long = {str(m): n for m in modules() if (n := len((PACKAGE / m).read_text(encoding="utf-8").splitlines())) > 400}
    assert long == {}
    sizes = [node.end_lineno - node.lineno + 1 for module in modules() for node in ast.walk(parsed(module))
             if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert np.percentile(sizes, 90) < 45 and np.median(sizes) <= 18


def run(code):
    """The last line that a fresh interpreter prints for `code`, started in the repository's root."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_reward_workers_load_no_jax():
    names = [f"rljax.rewards.{m.stem}" for m in modules() if m.parts[0] == "rewards" and m.stem != "__init__"]
    assert len(names) > 3
    code = f"import importlib, sys\nfor n in {['rljax', 'rljax.rewards', 'rljax.sample', *names]}:\n"
    code += "    importlib.import_module(n)\n"
    code += "print(sorted({m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')}))"
    assert run(code) == "[]"


def test_transformers_finds_no_package_kernels():
    """From the root the folder can be imported as `kernels`, which is the name of a Hugging Face package. It has no
    `__init__.py`: such a namespace is no package for transformers, which looks for the name, then for a distribution's
    version, then for the module's `__file__`."""
    if "kernels" in importlib.metadata.packages_distributions():
        pytest.skip("a package kernels is installed")
    code = "from transformers import AutoTokenizer; from transformers.utils import is_kernels_available as found\n"
    code += "print(found(), len(AutoTokenizer.from_pretrained('rljax/builtin/tiny')('1+2=').input_ids))"
    assert run(code) == "False 4"


def test_an_installed_package_kernels_comes_before_the_folder(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    code = f"import importlib.util, sys; sys.path.append({str(tmp_path)!r})\n"
    code += "print(importlib.util.find_spec('kernels').origin)"
    assert run(code) == str(tmp_path / "kernels" / "__init__.py")


def test_a_wheel_contains_the_kernels_inside_the_package():
    setuptools = pytest.importorskip("setuptools")
    found = setuptools.find_namespace_packages(str(ROOT), include=["rljax*"])  # as pyproject.toml says
    assert "rljax.kernels" in found and "kernels" not in found


def test_the_top_level_is_as_agreed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    tops = {name.split("/")[0] for name in tracked.stdout.splitlines()}
    allowed = {"pyproject.toml", "README.md", "LICENSE", "rljax", "launch", "configs", "tests", "kernels"}
    assert {name for name in tops if not name.startswith(".")} <= allowed
