"""The direction of the arrows: who may import whom, what a bare import loads, and what has to be declared."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ALLOWED: dict[str, frozenset[str]] = {
    "protocol": frozenset(),
    "toploc": frozenset(),
    "shardcast": frozenset({"protocol"}),
    "node": frozenset({"protocol", "toploc", "shardcast"}),
    "coordinator": frozenset({"protocol", "toploc", "shardcast"}),
}
OURS = frozenset(ALLOWED) | {"bench", "farflung"}
EXTRAS = {
    "protocol": (),
    "toploc": ("worker",),
    "shardcast": ("relay", "worker"),
    "node": ("worker",),
    "coordinator": ("coordinator",),
}


@dataclass(frozen=True)
class Import:
    """One imported module. `now`: executed while the importing module loads; `guarded`: inside a `try`."""

    target: str
    line: int
    now: bool
    guarded: bool


def _names(test: ast.expr) -> set[str]:
    nodes = [node for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute)]
    return {node.id if isinstance(node, ast.Name) else node.attr for node in nodes}


def _targets(node: ast.AST, module: str, is_package: bool, modules: Iterable[str]) -> Iterator[str]:
    """The absolute names that an import, or a call of `import_module` with a constant, stands for."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            parents = parts[: len(parts) - node.level + is_package]
            base = ".".join([*parents, *([base] if base else [])])
        submodules = {alias.name for alias in node.names if f"{base}.{alias.name}" in modules}
        yield from (f"{base}.{name}" for name in submodules)
        if len(submodules) < len(node.names):
            yield base
    elif isinstance(node, ast.Call) and _names(node.func) & {"import_module", "__import__"} and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and not name.value.startswith("."):
            yield name.value


def imports_of(source: str, module: str, is_package: bool, modules: Iterable[str]) -> list[Import]:
    """Every import of one file, wherever it stands."""
    found: list[Import] = []

    def visit(node: ast.AST, now: bool, guarded: bool) -> None:
        found.extend(
            Import(target, getattr(node, "lineno", 0), now, guarded)
            for target in _targets(node, module, is_package, modules)
        )
        if isinstance(node, ast.If) and "TYPE_CHECKING" in _names(node.test):
            for child in node.body:
                visit(child, False, guarded)
            for child in node.orelse:
                visit(child, now, guarded)
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            now = False
        for child in ast.iter_child_nodes(node):
            visit(child, now, guarded or isinstance(node, ast.Try))

    visit(ast.parse(source), True, False)
    return found


def read_tree(root: Path, packages: Iterable[str]) -> dict[str, list[Import]]:
    """Imports by dotted module name, for every file of the packages (or single-file modules) below `root`."""
    files: dict[str, Path] = {}
    for package in packages:
        single = root / f"{package}.py"
        for path in [single] if single.exists() else sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        module: imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py", files)
        for module, path in files.items()
    }


def violations(tree: dict[str, list[Import]]) -> list[str]:
    """Imports between our packages that the rule does not allow."""
    return [
        f"{module}:{found.line} imports {found.target}"
        for module, imports in tree.items()
        for package in [module.split(".")[0]]
        for found in imports
        for other in [found.target.split(".")[0]]
        if other in OURS and other != package and other not in ALLOWED[package]
    ]


def cycles(tree: dict[str, list[Import]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan), over what is imported at load time."""
    edges = {
        module: sorted({found.target for found in imports if found.now and found.target in tree})
        for module, imports in tree.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def connect(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                connect(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1 or module in edges[module]:
                found.append(sorted(component))

    for module in edges:
        if module not in index:
            connect(module)
    return found


@cache
def _installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(root: Path, extras: Iterable[str]) -> set[str]:
    """Distributions that pyproject.toml installs with the given extras, our own extras resolved."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements, todo = list(project["dependencies"]), list(extras)
    while todo:
        for requirement in project["optional-dependencies"][todo.pop()]:
            own = re.match(r"farflung\[(.+)\]", requirement)
            todo.extend(own.group(1).split(",") if own else [])
            requirements.append(requirement)
    return {_canonical(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_package_is_there(root: Path, package: str) -> None:
    assert (root / package / "__init__.py").is_file()


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_import_rule(root: Path, package: str) -> None:
    tree = read_tree(root, [package])
    assert tree
    assert violations(tree) == []


def test_no_import_cycles(root: Path) -> None:
    assert cycles(read_tree(root, ALLOWED)) == []


def test_front_door_imports_lazily(root: Path) -> None:
    imports = read_tree(root, ["farflung"])["farflung"]
    assert [i for i in imports if i.now and i.target.split(".")[0] not in sys.stdlib_module_names] == []


@pytest.mark.parametrize("module", ["farflung", "protocol", "shardcast"])
def test_bare_import_is_light(root: Path, module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'peft'}} & set(sys.modules)))"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_third_party_imports_are_declared(root: Path, package: str) -> None:
    """What loads with a module comes with its package's extra; guarded and lazy imports may be optional."""
    installed = _installed()
    known = declared(root, EXTRAS[package])
    missing = {
        f"{module}:{found.line} {found.target}"
        for module, imports in read_tree(root, [package]).items()
        for found in imports
        for top in [found.target.split(".")[0]]
        if found.now and not found.guarded and top not in OURS and top not in sys.stdlib_module_names
        if not known & {_canonical(name) for name in installed.get(top, [top])}
    }
    assert missing == set()


def _plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    "source",
    [
        "import coordinator",
        "from coordinator.ledger import states",
        "def later():\n    from coordinator import api",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import coordinator.api",
        "import importlib\nimportlib.import_module('coordinator.api')",
        "import bench.compare",
        "import farflung",
    ],
)
def test_rule_sees_a_planted_violation(tmp_path: Path, source: str) -> None:
    _plant(tmp_path, {"node/__init__.py": "", "node/sync.py": source})
    assert len(violations(read_tree(tmp_path, ["node"]))) == 1


def test_cycles_are_seen_and_lazy_ones_are_none(tmp_path: Path) -> None:
    _plant(
        tmp_path,
        {
            "node/__init__.py": "",
            "node/a.py": "from . import b",
            "node/b.py": "from .deep.c import x",
            "node/deep/__init__.py": "",
            "node/deep/c.py": "from ..a import y",
            "node/d.py": "import node.e",
            "node/e.py": "def later():\n    import node.d",
            "node/f.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from node import g",
            "node/g.py": "import node.f",
        },
    )
    assert cycles(read_tree(tmp_path, ["node"])) == [["node.a", "node.b", "node.deep.c"]]
