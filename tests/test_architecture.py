"""Imports go down only; see docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "syncline"

BOTTOM = {"errors"}
"""``torch_private`` is at the bottom too, but only what may import torch imports it."""
DATA = BOTTOM | {"plan"}
CORE = DATA | {"_native"}
TOOLS = CORE | {"plan.simulator", "plan.planners"}
COMM = CORE | {"comm.collectives"}
BACKEND = COMM | {"comm.groups", "comm.devices", "torch_entry", "torch_private"}
RUNTIME = (
    TOOLS
    | BACKEND
    | {"comm.backend", "files.traces", "files.report", "train.measure", "train.sparse"}
)
TRAINING = RUNTIME - {"comm.collectives", "comm.groups", "comm.devices", "comm.backend"}
LAB = RUNTIME | {"train", "lab.processes", "lab.workers"}
COMMANDS = LAB | {
    *("lab.training", "lab.testbed", "lab.replay", "lab.bench", "train.launched"),
    "__init__",
}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "torch_entry": set(),
    "torch_private": set(),
    "plan": BOTTOM,
    "plan.simulator": CORE,
    "plan.planners": CORE | {"plan.simulator"},
    "comm.collectives": CORE,
    "comm.groups": COMM,
    "comm.devices": COMM | {"comm.groups"},
    "comm.backend": BACKEND,
    "files.traces": DATA,
    "files.report": TOOLS | {"files.traces"},
    "train": TRAINING,
    "train.measure": TOOLS | {"torch_private"},
    "train.sparse": TOOLS | {"train.measure", "torch_private"},
    "train.launched": TRAINING | {"train"},
    "hooks": TRAINING,
    "integrations": TRAINING | {"train", "train.launched"},
    "lab.processes": BOTTOM,
    "lab.workers": BOTTOM | {"lab.processes"},
    "lab.testbed": DATA | {"lab.processes"},
    "lab.training": LAB,
    "lab.replay": LAB | {"lab.testbed"},
    "lab.bench": LAB | {"lab.testbed"},
    "cli": COMMANDS,
    "run": COMMANDS | {"cli"},
    "advise": COMMANDS | {"cli"},
}
"""What each part may import beside itself. ``__init__`` is the public surface above all but the
command line: it imports whatever it exports."""

WITHOUT_TORCH = {
    *("errors", "torch_entry", "plan", "plan.simulator", "plan.planners"),
    *("comm.collectives", "comm.groups", "files.traces", "files.report"),
    *("lab.processes", "lab.workers", "lab.testbed"),
}
ROOMS = {"plan", "comm", "files", "train", "integrations", "lab", "cli"}


def imports(path: Path, root: Path, *, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute name of everything that a module imports.

    Of ``from a import b`` the name is ``a.b``, whether ``b`` is a module or not.

    Args:
        path: of the module.
        root: the folder of the outermost package.
        lazy: include imports inside functions.
    """
    package = [root.name, *path.relative_to(root).parts[:-1]]
    for node in _nodes(ast.parse(path.read_text(), str(path)), lazy=lazy):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def _nodes(tree: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _nodes(node, lazy=lazy)


def circle(root: Path) -> list[str]:
    """Return modules that import each other in a circle, the first one also last; none: []."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join([root.name, *path.relative_to(root).with_suffix("").parts])
        modules[name.removesuffix(".__init__")] = path
    # The public surface imports everything, but each name only when it is used.
    del modules[root.name]
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = (name for _, name in imports(path, root, lazy=False))
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = targets & modules.keys() - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def part_of(root: Path, names: Sequence[str]) -> str:
    """Return which of the parts in ``ALLOWED`` a module belongs to, by its names below the root.

    What is no module of ours, such as ``__version__``, is of the public surface.
    """
    for length in (2, 1):
        name = ".".join(names[:length])
        if name in ALLOWED or name == "_native":
            return name
    return names[0] if names and (root / names[0]).is_dir() else "__init__"


def offences(root: Path) -> list[str]:
    """Return ``file:line`` and what is wrong for every import that goes up, or needs torch."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        own = part_of(root, inside.with_suffix("").parts)
        for line, name in imports(path, root):
            where = f"{path}:{line}: {own} imports {name}"
            parts = name.split(".")
            if own in WITHOUT_TORCH and parts[0] in ("torch", "torchvision"):
                found.append(f"{where}; it must work where torch is not installed")
            if parts[0] != root.name or own == "__init__":
                continue
            target = part_of(root, parts[1:])
            if own not in ALLOWED:
                found.append(f"{where}; say in ALLOWED what {own} may import")
            elif target != own and target not in ALLOWED[own]:
                allowed = ", ".join(sorted(ALLOWED[own])) or "nothing"
                found.append(f"{where}; it may import {allowed}")
    return found


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and name of what a module uses of torch that begins with an underscore."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            if re.match(r"(torch|dist|nn)(\.\w+)*?\._[^_\W]", name):
                yield node.lineno, name


def test_private_names_of_torch_are_in_one_module() -> None:
    found = {str(path.relative_to(SOURCE)): [*private_names(path)] for path in SOURCE.rglob("*.py")}
    assert len(found.pop("torch_private.py")) > 20
    assert not {path: names for path, names in found.items() if names}


def test_the_rooms_are_these() -> None:
    """A part of ``ALLOWED`` is a room, a folder or file of one, or a file beside them."""
    folders = {path.parent.relative_to(SOURCE).parts[:1] for path in SOURCE.rglob("*.py")}
    assert folders == {(), *((room,) for room in ROOMS)}


def test_imports_go_down_only() -> None:
    found = offences(SOURCE)
    assert not found, "\n" + "\n".join(found)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(SOURCE) == []


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("import syncline.plan.b", "from syncline.plan import a", True),
        ("from .b import x", "if TYPE_CHECKING:\n    from syncline.plan.a import y", True),
        ("class A:\n    from syncline.plan.b import x", "import syncline.plan.a", True),
        ("import syncline.plan.b", "def f():\n    import syncline.plan.a", False),
        ("import syncline.plan.b", "import syncline", False),
    ],
)
def test_circles_are_found(tmp_path: Path, first: str, second: str, found: bool) -> None:
    package = tmp_path / "syncline" / "plan"
    package.mkdir(parents=True)
    for path, text in (("a.py", first), ("b.py", second), ("../__init__.py", "")):
        (package / path).write_text(text)
    a, b = "syncline.plan.a", "syncline.plan.b"
    assert circle(tmp_path / "syncline") in ([[a, b, a], [b, a, b]] if found else [[]])


def test_test_modules_are_not_shared_between_folders() -> None:
    """What tests of several folders share is in modules of helpers: a folder can be run alone."""
    tests = Path(__file__).parent
    for path in sorted(tests.rglob("*.py")):
        own = ["tests", *path.relative_to(tests).parts[:-1]]
        for line, name in imports(path, tests):
            folder, found, _ = name.partition(".test_")
            if name.startswith("tests.") and found:
                assert folder.split(".") == own, f"{path}:{line}: {name}"


def test_the_table_has_no_cycle() -> None:
    for package, below in ALLOWED.items():
        for lower in below - {"_native", "__init__"}:
            assert package not in ALLOWED[lower], (package, lower)
            assert ALLOWED[lower] <= below, (package, lower)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("plan/a.py", "import syncline.plan.planners", "a.py:1: plan imports syncline.plan.plan"),
        ("plan/a.py", "\nfrom syncline.plan.planners import x", "a.py:2: plan imports"),
        ("plan/a.py", "from syncline.plan import planners", "plan imports syncline.plan.planners"),
        ("plan/a.py", "from syncline import __version__", "plan imports syncline.__version__"),
        ("plan/a.py", "from .planners import x", "plan imports syncline.plan.planners.x"),
        ("plan/a.py", "from . import planners", "plan imports syncline.plan.planners"),
        ("plan/a.py", "def f():\n    import syncline.cli", "a.py:2: plan imports syncline.cli"),
        ("plan/planners/a.py", "import torch.nn", "plan.planners imports torch.nn; it must work"),
        ("plan/planners/a.py", "from syncline.files.report import x", "syncline.files.report.x"),
        ("new/a.py", "from syncline.plan import x", "say in ALLOWED what new may import"),
        ("plan/a.py", "from syncline.plan import b", None),
        ("plan/a.py", "from . import b", None),
        ("plan/planners/a.py", "from syncline import _native", None),
        ("cli/a.py", "from syncline import __version__", None),
        ("train/measure/a.py", "import torch", None),
        ("__init__.py", "from syncline.cli import x", None),
    ],
)
def test_the_check_itself(tmp_path: Path, file: str, text: str, said: str | None) -> None:
    root = tmp_path / "syncline"
    for package in ("plan/planners", "files/report", "cli", "train/measure", "new"):
        (root / package).mkdir(parents=True)
    (root / "_native.pyi").touch()
    (root / file).write_text(text + "\n")
    assert [str(said) in each for each in offences(root)] == ([True] if said else [])
