"""What is published, and the workflows that check and publish it, agree with the project."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import raw
from tests.programs import ran

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ADDRESS = "https://host.example/owner/name"


SET_ADDRESS = runpy.run_path(str(ROOT / "tools" / "set-address"))


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(workflow.read_text())["jobs"])


def test_the_matrix_is_what_the_project_claims() -> None:
    matrix = jobs(ROOT / ".github" / "workflows" / "checks.yml")["test"]["strategy"]["matrix"]
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert {row["python"] for row in matrix["include"]} == set(claimed)
    assert PROJECT["project"]["requires-python"] == f">={claimed[0]}"
    (torch,) = PROJECT["project"]["optional-dependencies"]["torch"]
    oldest = torch.removeprefix("torch>=").partition(",")[0]
    assert {oldest, "newest"} <= {row["torch"] for row in matrix["include"]}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_the_projects_own_commands(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [
        step["run"] for job in jobs(workflow).values() for step in job["steps"] if "run" in step
    ]
    assert commands
    for command in commands:
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert target in targets, command
        for tool in re.findall(r"\btools/[a-z-]+", command):
            assert (ROOT / tool).stat().st_mode & 0o100, command


def test_a_release_shows_the_readme_with_absolute_links() -> None:
    readme = SET_ADDRESS["absolute"]((ROOT / "README.md").read_text(), ADDRESS, "v1.2.3")
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert not [target for target in targets if not target.startswith(("https://", "#"))]
    pictures = re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", readme)
    assert pictures
    assert all(picture.startswith(f"{ADDRESS}/raw/v1.2.3/docs/images/") for picture in pictures)


def test_a_release_knows_its_repository() -> None:
    changed = SET_ADDRESS["with_urls"]((ROOT / "pyproject.toml").read_text(), ADDRESS, "v1.2.3")
    project = tomllib.loads(changed)
    urls = project["project"].pop("urls")
    assert project == PROJECT
    assert urls["Repository"] == ADDRESS
    with pytest.raises(SystemExit, match="already"):
        SET_ADDRESS["with_urls"](changed, ADDRESS, "v1.2.3")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    for machine in ("x86_64", "aarch64"):
        for python in ("cp311-cp311", "cp312-abi3"):
            (tmp_path / f"syncline-1.2.3-{python}-manylinux_2_28_{machine}.whl").touch()
    (tmp_path / "syncline-1.2.3.tar.gz").touch()
    return tmp_path


def checked(release: Path, tag: str) -> subprocess.CompletedProcess[str]:
    return ran(ROOT / "tools" / "check-release", tag, release)


def test_a_release_is_checked(release: Path) -> None:
    assert checked(release, "v1.2.3").returncode == 0
    assert checked(release, "v1.2.4").returncode != 0
    with (release / "syncline-1.2.3.tar.gz").open("wb") as file:
        file.truncate(5_000_001)
    outcome = checked(release, "v1.2.3")
    assert (outcome.returncode, "5000001 bytes" in outcome.stderr) == (1, True)


def test_a_wheel_of_another_machine_is_missed(release: Path) -> None:
    next(release.glob("*cp312*aarch64.whl")).unlink()
    assert checked(release, "v1.2.3").returncode != 0


def test_the_citation_names_the_five_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert len({paper["title"] for paper in citation["references"]}) == 5
    assert all(paper["authors"] and paper["year"] for paper in citation["references"])


def test_large_results_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    small, large = {"s": [1.5]}, {"s": list(range(raw.PLAIN_BYTES))}
    assert raw.write(path, small) == path
    assert raw.write(path, large).name == "result.json.gz"
    assert not path.exists()
    assert raw.read(path) == large
    assert raw.write(path, small) == path
    assert raw.read(path) == small
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


# The Makefile's targets, as far as they can be tried without building anything


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = (shutil.which("make") or "make", "--no-print-directory", *arguments)
    done = ran(*command, cwd=ROOT, **environment)
    assert done.returncode == 0, done.stderr
    return done


def test_constraints_name_the_torch_that_was_asked_for() -> None:
    for version, said in (("2.11", "torch==2.11.*"), ("newest", "torch>=2.11")):
        assert said in make("-n", "-B", "build/constraints.txt", f"TORCH={version}").stdout


def test_tests_need_no_right_to_install_a_browser(tmp_path: Path) -> None:
    """Neither root nor sudo, and no browser: the target says what is missing, and goes on."""
    for name, does in {"id": "echo 1000", "apt-get": "exit 1", "sudo": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    outcome = make("test-tools", PATH=str(tmp_path))
    assert "apt-get install chromium" in outcome.stderr
    assert "skipped" in outcome.stdout
