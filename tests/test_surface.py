"""The public surface: what ``import syncline`` offers, and that it needs no torch to plan."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import syncline
from syncline.plan.network import PRESETS
from tests import strategies as some
from tests.timeouts import DEADLINE_S

SOURCE = Path(syncline.__file__).parent


def test_every_public_name_resolves() -> None:
    pytest.importorskip("torch")
    for name in syncline.__all__:
        assert getattr(syncline, name) is not None
    assert len(set(syncline.__all__)) == len(syncline.__all__)
    assert set(syncline.__all__) <= set(dir(syncline))


def test_nothing_public_is_missing_from_all() -> None:
    ours = {
        name
        for name, value in vars(syncline).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", "")).startswith("syncline")
    }
    assert set(syncline.__all__) == ours | set(syncline._LAZY)


def test_type_checkers_see_what_is_imported_lazily() -> None:
    [block] = [
        node
        for node in ast.parse((SOURCE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and str(node.module) != "typing"
        for alias in node.names
    }
    assert seen == syncline._LAZY


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="'syncline' has no attribute 'distributed'"):
        _ = syncline.distributed


def test_the_version_is_the_packages() -> None:
    assert importlib.metadata.version("syncline") == syncline.__version__


def test_all_lists_what_modules_define() -> None:
    """Every name in a module's ``__all__`` is defined there."""
    for path in sorted(SOURCE.rglob("*.py")):
        body = ast.parse(path.read_text()).body
        defined: set[str] = set()
        listed: list[str] = []
        for node in body:
            if isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                if names == ["__all__"]:
                    listed = ast.literal_eval(node.value)
                defined |= set(names)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.add(node.target.id)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                defined |= {alias.asname or alias.name for alias in node.names}
        missing = set(listed) - defined
        assert path == SOURCE / "__init__.py" or not missing, (path, missing)


# Without torch

IMPORT_ALL = """
import importlib, pkgutil, sys
{block}
import syncline, syncline.cli
for room in ("plan", "files"):
    found = importlib.import_module("syncline." + room)
    for module in pkgutil.walk_packages(found.__path__, found.__name__ + "."):
        importlib.import_module(module.name)
for command in ("plan", "simulate", "report", "trace"):
    importlib.import_module("syncline.cli." + command)
higher = tuple("syncline." + room for room in ("comm", "train", "lab"))
assert not [name for name in sys.modules if name.startswith(higher)]
for command in ("show", "emulate", "replay"):
    importlib.import_module("syncline.cli." + command)
for name in ("PLANNERS", "choose", "planner_named", "predict", "Profile", "Network", "Plan"):
    getattr(syncline, name)
assert sys.modules.get("torch") is None, "torch was imported"
{check}
"""
BLOCK = "sys.modules['torch'] = None"
CHECK = """
for name in ("DistributedDataParallel", "profile", "probe"):
    try:
        getattr(syncline, name)
    except ImportError as error:
        assert "needs torch" in str(error) and "pip install" in str(error), error
    else:
        raise AssertionError(name)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize(
    ("block", "check"), [(BLOCK, CHECK), ("", "")], ids=["torch blocked", "torch present"]
)
def test_planning_and_reading_reports_never_import_torch(block: str, check: str) -> None:
    result = python(IMPORT_ALL.format(block=block, check=check))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "profile.json", "10gbe-k80"),
        ("simulate", "profile.json", "network.json", "--json"),
        ("show", "profile.json"),
        ("report", "--help"),
        ("replay", "--help"),
        ("--help",),
    ],
)
def test_commands_without_torch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    some.profile_of([1000, 2000], [30, 40]).save(tmp_path / "profile.json")
    PRESETS["10gbe-k80"].save(tmp_path / "network.json")
    code = f"import os, sys; {BLOCK}; os.chdir(sys.argv[1]); from syncline.cli import main"
    result = python(f"{code}; main(sys.argv[2:])", str(tmp_path), *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert result.stderr == ""


# Without the repository


def test_no_text_names_a_page_of_the_repository() -> None:
    """Whoever has a wheel has no ``docs``: a message says the thing itself, or names a command."""
    named = re.compile(r"\bdocs/|\b[\w-]+\.md\b(?<!PERFORMANCE\.md)")
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(p for p in SOURCE.rglob("*") if p.suffix in (".py", ".js", ".html"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line)
    ]
    assert found == []
