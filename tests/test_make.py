"""The Makefile's targets, as far as they can be tried without building anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.timeouts import DEADLINE_S

ROOT = Path(__file__).parents[1]


def make(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    make = shutil.which("make")
    assert make is not None
    environment = os.environ | ({"PATH": str(path)} if path else {})
    return subprocess.run(
        [make, "--no-print-directory", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )


def test_constraints_name_the_torch_that_was_asked_for() -> None:
    def made(version: str) -> str:
        return make("-n", "-B", "build/constraints.txt", f"TORCH={version}").stdout

    assert "torch==2.11.*" in made("2.11")
    assert "torch>=2.11" in made("newest")


def test_tests_need_no_right_to_install_a_browser(tmp_path: Path) -> None:
    """Neither root nor sudo, and no browser: the target says what is missing, and goes on."""
    for name, does in {"id": "echo 1000", "apt-get": "exit 1", "sudo": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    outcome = make("test-tools", path=tmp_path)
    assert "apt-get install chromium" in outcome.stderr
    assert "skipped" in outcome.stdout
