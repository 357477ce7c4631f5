"""The public surface: what ``import syncline`` offers, without torch too, and what errors say."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import syncline
from syncline.errors import UserError, quoted, require_known, shortened, unknown
from syncline.plan.network import PRESETS
from tests import strategies as some
from tests.programs import ran

SOURCE = Path(syncline.__file__).parent


def test_public_names_are_all_listed_and_seen_by_type_checkers() -> None:
    pytest.importorskip("torch")
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
    for name, module in seen.items():
        assert getattr(syncline, name) is getattr(importlib.import_module(module), name)
    imported = {
        name
        for name, value in vars(syncline).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", "")).startswith("syncline")
    }
    assert sorted(syncline.__all__) == sorted(imported | seen.keys())
    lazy = set(dir(syncline)) - vars(syncline).keys()
    assert lazy == seen.keys()


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="'syncline' has no attribute 'distributed'"):
        _ = syncline.distributed


def test_the_version_is_the_packages() -> None:
    assert importlib.metadata.version("syncline") == syncline.__version__


def test_all_lists_what_modules_define() -> None:
    """Every name in a module's ``__all__`` is defined there."""
    for path in sorted(SOURCE.rglob("*.py")):
        defined: set[str] = set()
        listed: list[str] = []
        for node in ast.parse(path.read_text()).body:
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
        assert path == SOURCE / "__init__.py" or set(listed) <= defined, path


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
    done = ran(sys.executable, "-W", "error", "-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("block", "check"), [(BLOCK, CHECK), ("", "")], ids=["torch blocked", "torch present"]
)
def test_planning_and_reading_reports_never_import_torch(block: str, check: str) -> None:
    python(IMPORT_ALL.format(block=block, check=check))


TRAINING = """
import sys, syncline
from pathlib import Path
assert syncline.DistributedDataParallel
files = {name: m.__file__ for name, m in sys.modules.items() if name.startswith("syncline.")}
assert {name.split(".")[1] for name in files} & {"comm", "files", "lab", "cli"} == set(), files
text = "".join(Path(file).read_text() for file in files.values() if file.endswith(".py"))
assert len(text.splitlines()) <= 26_000
"""


def test_training_loads_nothing_of_other_rooms() -> None:
    python(TRAINING)


COMMANDS = """
import os, sys; {block}
os.chdir(sys.argv[1])
from syncline.cli import main
for command in sys.argv[2:]:
    print("###")
    main(command.split())
"""


def test_commands_without_torch(tmp_path: Path) -> None:
    some.profile_of([1000, 2000], [30, 40]).save(tmp_path / "profile.json")
    PRESETS["10gbe-k80"].save(tmp_path / "network.json")
    planned = ("plan profile.json 10gbe-k80", "simulate profile.json network.json --json")
    others = ("show profile.json", "report --help", "replay --help", "--help")
    result = python(COMMANDS.format(block=BLOCK), str(tmp_path), *planned, *others)
    assert result.stderr == ""
    _, *printed = result.stdout.split("###\n")
    assert len(printed) == 6
    assert all(printed)


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


def test_values_in_messages_are_short() -> None:
    for value, said in (
        ([[]], "a list"),
        ({}, "an object"),
        ("x" * 90, repr("x" * 80) + "..."),
        (b"x" * 90, repr(b"x" * 80) + "..."),
        ("short", "'short'"),
        (10**5000, "a number of more than 20 digits"),
        (None, "None"),
        (1.5, "1.5"),
    ):
        assert quoted(value) == said


def test_long_texts_in_messages_lose_their_middle() -> None:
    assert shortened("abc") == "abc"
    assert shortened("a\nb\x1b[31mc\u00e4") == r"a\nb\x1b[31mc\u00e4".replace(r"\u00e4", "\u00e4")
    assert shortened("a" * 300 + "b" * 300) == "a" * 200 + "..." + "b" * 200


def test_an_unknown_name_is_said_with_the_nearest_and_all_that_are_known() -> None:
    require_known("planner", "merge", ["merge", "wfbp"])
    require_known("type", "bf16", ["bfloat16"], also={"bf16": "bfloat16"})
    with pytest.raises(UserError) as caught:
        require_known("planner", "murge", {"merge": 1, "wfbp": 2}, where="recipe: ")
    said = "unknown planner 'murge'; did you mean 'merge'? (known: merge, wfbp)"
    assert str(caught.value) == f"recipe: {said}"
    assert unknown("planner", "zzz", ["merge"]) == "unknown planner 'zzz' (known: merge)"
    nearest = unknown("type", "fp15", ["float32"], also=["fp16"])
    assert nearest == "unknown type 'fp15'; did you mean 'fp16'? (known: float32)"
