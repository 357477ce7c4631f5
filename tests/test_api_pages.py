"""The reference: every public name is on a page, with an example that runs."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import syncline
from tests.pages import DOCS, code_blocks
from tests.programs import output_of

API = DOCS / "api"
TEXTS = {path.stem: path.read_text() for path in API.glob("*.md")}
NEEDS = {"planning": ["data"]}  # pages whose examples go on from those of another page


def blocks(page: str, language: str) -> str:
    return "\n".join(code_blocks(TEXTS[page], language))


def test_every_public_name_is_described_and_used() -> None:
    text = "\n".join(TEXTS.values())
    described = set(re.findall(r"^::: syncline\.(\w+)$", text, re.MULTILINE))
    assert described == set(syncline.__all__)
    code = "\n".join(blocks(page, "(?:pycon|python)") for page in TEXTS)
    assert not [name for name in described if not re.search(rf"\b{name}\b", code)]


@pytest.mark.parametrize("page", sorted(page for page in TEXTS if blocks(page, "pycon")))
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for each in [*NEEDS.get(page, []), page]:
        example = doctest.DocTestParser().get_doctest(blocks(each, "pycon"), names, each, None, 0)
        outcome = doctest.DocTestRunner().run(example, clear_globs=False)
        assert outcome.attempted
        assert not outcome.failed
        names = example.globs


@pytest.mark.slow
def test_the_training_script_runs_on_two_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("training", "python"))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    printed = output_of(*torchrun, "--standalone", "train.py", cwd=tmp_path)
    assert "exposed_communication_s" in printed or "iteration" in printed
