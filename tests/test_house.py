"""The rules of the house: who may import whom, and that every public name is explained."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import dualform
from dualform import optimizers

SOURCE = Path(dualform.__file__).parent
EVERYTHING = {
    "memory",
    "ledger",
    "recording",
    "read",
    "attention",
    "diagnose",
    "explore",
    "evaluate",
    "testing",
}
EVERYTHING |= {
    "layers",
    "optimizers",
    "owners",
    "families",
    "integrations",
    "studies",
    "demo",
    "cli",
    "compaction",
}
MAY_IMPORT = {
    "errors": set(),
    "private": set(),
    "version": set(),
    "memory": set(),
    "families": {"memory"},
    "ledger": set(),
    "layers": {"memory", "ledger"},
    "optimizers": {"memory"},
    "owners": {"layers", "ledger"},
    "recording": {"memory", "layers", "optimizers", "owners", "ledger"},
    "read": {"memory", "layers", "optimizers", "owners", "ledger"},
    "compaction": {"memory", "layers", "optimizers", "ledger", "recording", "read"},
    "attention": {"memory", "families"},
    "diagnose": {"memory", "attention", "read"},
    "integrations": {"recording"},
    "explore": {"read", "ledger", "diagnose"},
    "evaluate": {"read"},
    "testing": {"memory", "layers", "optimizers", "ledger", "recording", "read"},
    "studies": EVERYTHING,
    "demo": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": {"cli"},
    "": EVERYTHING,
}
"""What each part may import, besides itself and `ANYBODYS`; ARCHITECTURE.md says why."""
ANYBODYS = {"errors", "private", "version"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name without the package's."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@cache
def nodes(path: Path) -> list[ast.AST]:
    """What a module is made of."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """A million nodes are not kept for the tests that follow."""
    yield
    nodes.cache_clear()


@cache
def imports(path: Path) -> set[str]:
    """The modules of ours that a module imports when it is loaded or run."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualform"):
            found.add((node.module or "").removeprefix("dualform").removeprefix("."))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("dualform.")]
            found |= {name.removeprefix("dualform.") for name in names}
    return found


def test_import_table() -> None:
    for module, path in modules().items():
        part = module.split(".")[0]
        allowed = {part, *ANYBODYS, *MAY_IMPORT[part]}
        for imported in imports(path):
            fine = any(imported == name or imported.startswith(f"{name}.") for name in allowed)
            assert fine, f"dualform.{module} must not import dualform.{imported}"


def test_no_import_cycles() -> None:
    graph = {name: imports(path) & set(modules()) for name, path in modules().items() if name}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way[way.index(name) :], name))
        if name not in done:
            for imported in sorted(graph.get(name, ())):
                visit(imported, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def public_names() -> list[tuple[str, object]]:
    """What the front door and the parts' own front doors offer."""
    parts = ["", ".errors", ".memory", ".ledger", ".recording", ".read", ".explore", ".testing"]
    parts += [".compaction", ".integrations", ".evaluate", ".attention", ".attention.transformers"]
    parts += [".families", ".families.layers", ".families.fixed_points", ".diagnose"]
    found: dict[int, tuple[str, object]] = {}
    for part in parts:
        module = importlib.import_module(f"dualform{part}")
        for name in getattr(module, "__all__", []):
            value = getattr(module, name)
            found.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return sorted(found.values(), key=lambda pair: pair[0])


@pytest.mark.parametrize(("name", "value"), public_names(), ids=[n for n, _ in public_names()])
def test_public_names_are_explained_by_example(name: str, value: object) -> None:
    text = inspect.getdoc(value) or ""
    assert text, f"{name} has no docstring"
    assert ">>>" in text or "```python" in text, f"{name} has no example"


@pytest.mark.parametrize("name", [n for n, v in public_names() if inspect.isclass(v)])
def test_public_methods_are_explained(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    cls = getattr(importlib.import_module(module), attribute)
    for method, value in vars(cls).items():
        if not method.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, property)
        ):
            assert inspect.getdoc(value), f"{name}.{method} has no docstring"


def switches(path: Path) -> list[str]:
    """The names of the classes that a module tells apart by `isinstance`."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            parts = list(ast.walk(node.args[1]))
            found += [part.id for part in parts if isinstance(part, ast.Name)]
            found += [part.attr for part in parts if isinstance(part, ast.Attribute)]
    return found


def test_rules_and_operators_are_asked_by_methods() -> None:
    """A new type of either is one new file: nobody asks which type one has."""
    kinds = [optimizers.Rule, optimizers.Operator, optimizers.Step]
    for kind in kinds:
        kinds += kind.__subclasses__()
    names = {kind.__name__ for kind in kinds}
    assert {"ScalarRule", "AdamRule", "Sided", "Number", "Descended"} <= names
    for name, path in modules().items():
        if name.startswith(("read", "recording")):
            assert not names.intersection(switches(path)), name


def test_forms_are_asked_by_methods() -> None:
    """A new form is one new file: nobody compares its name."""
    for name, path in modules().items():
        if not name.startswith(("read", "recording")):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                compared = [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)]
                assert "form" not in compared, f"{name}, line {node.lineno}"


def test_files_can_be_read_in_one_sitting() -> None:
    long = {str(p): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_every_package_is_found() -> None:
    """Folders without `__init__` would be left out of the wheel's tests."""
    found = {info.name for info in pkgutil.walk_packages([str(SOURCE)], "dualform.")}
    assert {f"dualform.{name}" for name in modules() if name} == found


PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}
"""Names with a line before them that are public all the same: those of named tuples, and of os."""
THEIRS = {"_C", "_base", "_buffers", "_indices", "_modules", "_parameters", "_values", "_version"}
"""Private names of torch that some class of ours may have as well."""


def is_private(name: str) -> bool:
    """`_name`, but not `__name__`, which Python documents."""
    return name.startswith("_") and not name.startswith("__") and name not in {*PUBLIC, "_"}


@cache
def names_of_ours() -> set[str]:
    """What is defined in the package: functions, classes, attributes and variables."""
    found = set()
    for path in modules().values():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found - THEIRS


def private_uses(parts: Iterable[ast.AST], ours: set[str]) -> list[str]:
    """Where code uses a private name of another package."""
    found = []
    for node in parts:
        names: list[str] = []
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if "dualform" not in module:
                names = [*module.split("."), *(alias.name for alias in aliases)]
            case ast.Import(names=aliases):
                names = [part for alias in aliases for part in alias.name.split(".")]
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                names = [name] if name not in THEIRS else []
            case ast.Attribute(attr=name):
                names = [name]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]
            ):
                names = [name]
            case ast.Constant(value=str(text)) if re.fullmatch(r"torch(\.\w+)+", text):
                names = text.split(".")
        private = [name for name in names if is_private(name) and name not in ours]
        found += [f"line {node.lineno}: {name}" for name in private]  # type: ignore[attr-defined]
    return found


def test_private_names_of_other_packages_stand_in_one_file() -> None:
    for module in set(modules()) - {"private"}:
        uses = private_uses(nodes(modules()[module]), names_of_ours())
        assert not uses, f"dualform.{module} must ask dualform.private for {', '.join(uses)}"


@pytest.mark.parametrize(
    "code",
    [
        "from torch._C import Generator",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "torch._standard_gamma(x)",
        "torch.nn.modules.dropout._DropoutNd",
        "self.points._version",
        "gradient.coalesce()._values()",
        "layer._parameters",
        "getattr(module, '_compiler_ctx', None)",
        "'torch._dynamo' in sys.modules",
    ],
)
def test_private_names_are_noticed(code: str) -> None:
    assert private_uses(ast.walk(ast.parse(code)), names_of_ours())


def test_what_is_not_private_is_let_be() -> None:
    code = "self._parameters, self._rows, pair._replace(a=1), f.__code__, os._exit(1), part._parts"
    assert private_uses(ast.walk(ast.parse(code)), {"_rows", "_parts"}) == []


LOADS = """
import importlib, os, sys, torch
for chain in sys.argv[1:]:
    if (child := os.fork()) == 0:
        for name in chain.split():
            importlib.import_module(name)
            loaded = {part.split(".")[1] for part in sys.modules if part.startswith("dualform.")}
            print(name, *sorted(loaded), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, chain
"""


def loaded_by(*chains: list[str]) -> dict[str, set[str]]:
    """The parts that are loaded after each of some imports; every chain has its own process."""
    run = subprocess.run(
        [sys.executable, "-c", LOADS, *map(" ".join, chains)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in run.stdout.splitlines()]
    return {name: set(loaded) for name, *loaded in lines}


def closure(part: str) -> set[str]:
    """A part, and everything that the import table lets it load, directly or not."""
    found, waiting = set(), [part]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += [*MAY_IMPORT[name], *ANYBODYS]
    return found


def chains(parts: Iterable[str]) -> list[list[str]]:
    """Parts one after the other, where each may load all that those before it may."""
    found: list[list[str]] = []
    for part in sorted(parts, key=lambda part: len(closure(part))):
        fitting = [chain for chain in found if closure(chain[-1]) <= closure(part)]
        if fitting:
            fitting[-1].append(part)
        else:
            found.append([part])
    return found


def test_import_table_holds_for_what_is_loaded() -> None:
    parts = sorted(set(MAY_IMPORT) - {"", "__main__"})
    named = [[f"dualform.{part}" for part in chain] for chain in chains(parts)]
    loaded = loaded_by(["dualform"], *named)
    assert loaded["dualform"] == {"version"}, "the front door loads nothing else"
    for part in parts:
        assert part in loaded[f"dualform.{part}"]
        assert loaded[f"dualform.{part}"] <= closure(part), f"dualform.{part}"


def test_every_name_of_the_front_door_is_found() -> None:
    for name in [*dualform.__all__, *dualform.PARTS]:
        assert name in dir(dualform)
        assert getattr(dualform, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        dualform.recrod  # noqa: B018


def test_classes_have_names_of_their_own() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_what_shares_a_fixture_runs_in_one_process(request: pytest.FixtureRequest) -> None:
    """The group is a part of the name by which `pytest -n 2` hands out a test."""
    spread = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("@test_house.py") == spread
