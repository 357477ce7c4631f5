"""Standard output that is full, closed, or read by nobody: one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from syncline.plan.network import PRESETS
from tests.cli.examples import Printed
from tests.lab.testbed.machine import SYNCLINE, finished
from tests.timeouts import DEADLINE_S


def _ended(command: list[str], output: int | None, **environment: str) -> tuple[int, str]:
    """Return how a command ended whose standard output is this descriptor, or closed."""
    redirect = "" if output is not None else ">&-"
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirect}', "sh", *SYNCLINE, *command],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stderr


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    PRESETS["10gbe-k80"].save(network := tmp_path / "network.json")
    read, nobody = os.pipe()
    os.close(read)
    with Path("/dev/full").open("wb") as full:
        cases = [
            (["show", str(network)], full.fileno(), 1, "No space left on device"),
            (["show", str(network), "--json"], full.fileno(), 1, "No space left on device"),
            (["--help"], nobody, 141, "Broken pipe"),
            (["show", str(network), "--json"], nobody, 141, "Broken pipe"),
        ]
        for command, output, expected, problem in cases:
            for unbuffered in ("", "1"):
                code, said = _ended(command, output, PYTHONUNBUFFERED=unbuffered)
                assert said.startswith(f"error: standard output cannot be written: {problem}")
                assert (code, said.count("\n")) == (expected, 1)
    os.close(nobody)
    code, said = _ended(["show", str(network)], None)
    assert said == "error: standard output is closed; send it to a file, or to /dev/null\n"
    assert code == 2


def test_an_unknown_width_of_the_terminal_hides_nothing(tmp_path: Path) -> None:
    PRESETS["10gbe-k80"].save(network := tmp_path / "network.json")
    with (tmp_path / "said").open("wb") as said:
        assert _ended(["show", str(network)], said.fileno(), COLUMNS="0") == (0, "")
    assert "10gbe-k80" in (tmp_path / "said").read_text()


def test_an_error_cannot_steer_the_terminal(refused: Printed) -> None:
    assert refused("show", "\x1b[2Jno.json").startswith("error: \\x1b[2Jno.json: no such file")


def test_a_closed_standard_error_is_not_a_file_of_ours(tmp_path: Path) -> None:
    """What would be written to it must not land in a file that was opened in its place."""
    PRESETS["10gbe-k80"].save(network := tmp_path / "network.json")
    script = (
        "import os, sys; from syncline.cli import main; sys.argv[1:] = ['show', sys.argv[1]]\n"
        "main(); print(os.readlink('/proc/self/fd/2'), os.readlink('/proc/self/fd/0'))"
    )
    shell = f'"{sys.executable}" -P -c "$1" "$2" 2>&- <&-'
    done = finished("sh", "-c", shell, "sh", script, network)
    assert done.stdout.splitlines()[-1] == "/dev/null /dev/null"


def test_ctrl_c_stops_at_once_where_an_exception_would_be_lost() -> None:
    code = """
import os, signal, sys
from syncline.cli import main
sys.argv = ["syncline", "help", "network"]
main()
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""
    result = finished(sys.executable, "-c", code)
    assert (result.returncode, result.stderr) == (130, "stopped\n")
