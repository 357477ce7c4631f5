"""Installing Syncline changes no other program: what torch runs when it is imported.

Other versions of torch are stood in for by a small package of that name, which calls entry points
as torch does: what counts is that nothing is loaded or raised, whatever torch is like.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import syncline
from syncline.torch_entry import LAUNCHED, TORCH, untried
from syncline.train.ddp import DistributedDataParallel
from tests.programs import output_of, ran
from tests.train.fault_jobs import error_of
from tests.train.jobs import OPTIMIZERS, Twins, differing
from tests.train.models import Plain
from tests.words import assert_tells
from tests.workers import WorkerPool

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "src" / "syncline" / "torch_entry.py"
PYTHON = sys.version.split()[0]

STUB = """
__version__ = {version!r}
{distributed}
from importlib.metadata import entry_points
for extension in entry_points(group="torch.backends"):
    try:
        extension.load()()
    except Exception as error:
        raise RuntimeError(f"Failed to load the backend extension: {{extension.name}}") from error
"""
DISTRIBUTED = """
class Backend:
    backend_list = ["gloo"]
    creators = {}

    @classmethod
    def register_backend(cls, name, function, extended_api=False, devices=None):
        cls.backend_list.append(name)
        cls.creators[name] = function
"""
OLD = DISTRIBUTED.replace(", extended_api=False, devices=None", "")
"""A ``register_backend`` that does not take what is given."""
ASK = """
import sys, torch
print(sorted(m for m in sys.modules if m.startswith("syncline")))
try:
    torch.distributed.Backend.creators["syncline"](None, None)
except ImportError as error:
    print(error)
"""


def without_packages(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code without this environment's packages."""
    python = (sys.executable, "-S", "-W", "error", "-c", code)
    return ran(*python, cwd=paths[0], PYTHONPATH=os.pathsep.join(map(str, paths)))


def run(code: str, *paths: Path) -> str:
    """Return what code prints without this environment's packages."""
    done = without_packages(code, *paths)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """What is left of an installation without the package: the entry point and its metadata."""
    folder = tmp_path / "site"
    metadata = folder / "syncline-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entry = project["entry-points"]["torch.backends"]["syncline"]
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\nsyncline = {entry}\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: syncline\nVersion: 0.1.0\n")
    shutil.copy(ENTRY, folder / "syncline_torch_entry.py")
    return folder


def stub(folder: Path, version: str, distributed: str | None = DISTRIBUTED) -> Path:
    """Write a package that is imported as torch is; without ``distributed``, it has none."""
    package = folder / "stub" / "torch"
    package.mkdir(parents=True)
    line = "" if distributed is None else "from torch import distributed"
    (package / "__init__.py").write_text(STUB.format(version=version, distributed=line))
    if distributed is not None:
        (package / "distributed.py").write_text(distributed)
    return package.parent


def test_this_environment_has_the_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch.backends", name="syncline")
    assert entry.value == "syncline_torch_entry:autoload"
    installed = Path(sys.modules[entry.load().__module__].__file__ or "")
    assert installed.read_text() == ENTRY.read_text(), "install again: make setup"


def test_the_supported_torch_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["torch"] == [f"torch{TORCH}"]
    assert f"`torch{TORCH}`" in (ROOT / "docs" / "index.md").read_text()
    (note,) = (ROOT / "docs" / "design").glob("*-dependencies.md")
    assert f"torch `{TORCH}`" in note.read_text()


VERSIONS = {
    None: ("2.11.0", "2.11.1", "2.13.0+cpu", "2.15.1", "2.13.0a0+git1"),
    "older": ("1.13.1", "2.9.1", "2.10.0", "2.11.0rc1", "2.11.0.dev2026"),
    "newer": ("2.16.0", "2.16.0a0+git1", "2.16.0+cu130", "3.0", "unknown"),
}


@pytest.mark.parametrize(("version", "is_"), [(v, is_) for is_ in VERSIONS for v in VERSIONS[is_]])
def test_versions_that_were_not_tried(version: str, is_: str | None) -> None:
    assert untried(version) == is_


LOADED = "import sys; before = set(sys.modules); {}; print(sorted(set(sys.modules) - before))"


def test_the_entry_and_the_package_need_little(site: Path) -> None:
    code = LOADED.format("import syncline_torch_entry as e; e.autoload()")
    assert run(code, site) == "['__future__', 'syncline_torch_entry']\n"
    loaded = "['__future__', 'syncline', 'syncline.errors', 'syncline.torch_entry']\n"
    assert run(LOADED.format("import syncline"), ROOT / "src") == loaded
    # Under `syncline run`, too: a script may import torch later.
    launched = f"import os; os.environ['{LAUNCHED}'] = '{{}}'; "
    assert run(launched + LOADED.format("import syncline"), ROOT / "src") == loaded


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "2.17.0a0+git1"])
def test_a_torch_that_was_not_tried_can_be_imported(site: Path, version: str) -> None:
    """Also where the package is whole: the backend is refused when it is asked for."""
    loaded, message = run(ASK, site, stub(site.parent, version), ROOT / "src").splitlines()
    assert loaded == "['syncline_torch_entry']"
    found = f"found syncline 0.1.0, torch {version}, Python {PYTHON}"
    assert_tells(message, f"torch {version}", found, f"syncline 0.1.0 is for torch{TORCH}", "gloo")


def test_half_an_installation(site: Path) -> None:
    """A clone that an editable installation refers to was deleted, or files were removed."""
    loaded, message = run(ASK, site, stub(site.parent, "2.13.0")).splitlines()
    assert loaded == "['syncline_torch_entry']"
    found = f"found syncline 0.1.0, torch 2.13.0, Python {PYTHON};"
    assert_tells(message, "ModuleNotFoundError: No module named", found, "install syncline again")


def test_a_script_of_the_same_name(site: Path) -> None:
    (site / "syncline.py").write_text("raise SystemExit('the wrong module was imported')\n")
    assert run("import torch", site, stub(site.parent, "2.13.0")) == ""


@pytest.mark.parametrize(
    "distributed", [None, "", OLD], ids=["none", "not built", "another register_backend"]
)
def test_a_torch_that_takes_no_backend(site: Path, distributed: str | None) -> None:
    paths = site, stub(site.parent, "2.13.0", distributed)
    assert run("import torch", *paths) == ""
    if distributed == OLD:  # whoever looks for it finds the reason
        code = "import logging; logging.basicConfig(level=10, format='%(message)s'); import torch"
        said = without_packages(code, *paths).stderr
        assert said.startswith("torch refused the backend syncline\nTraceback")
        assert "unexpected keyword argument" in said


BROKEN = """
import sys

class Broken:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "syncline._native":
            raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.99' not found")

sys.meta_path.insert(0, Broken)
import torch
import torch.distributed as dist
assert not [m for m in sys.modules if m.split(".")[0] == "syncline"], sys.modules.keys()
store = dist.HashStore()
try:
    dist.init_process_group("syncline", store=store, rank=0, world_size=1)
except ImportError as error:
    print(error)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
import syncline
try:
    syncline.DistributedDataParallel
except ImportError as error:
    print(error)
"""
UNLOADED = """
import torch
backends = torch.distributed.Backend.backend_list
assert "syncline" not in backends
import syncline
assert "syncline" in backends
"""


def test_a_native_core_that_cannot_be_loaded() -> None:
    said = output_of(sys.executable, "-c", BROKEN).splitlines()
    refused = [line.partition(" cannot")[0] for line in said]
    assert refused == ["backend syncline", "syncline.DistributedDataParallel"]
    for line in said:
        assert "ImportError: libstdc++.so.6: version `GLIBCXX_3.4.99' not found" in line
        assert f"found syncline {syncline.__version__}, torch {torch.__version__}, " in line


def test_without_torchs_autoload_the_package_registers_it() -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert output_of(sys.executable, "-c", UNLOADED, **off) == ""


# Training under another version of torch: only its number is another.


def under(version: str) -> Any:
    return mock.patch.object(torch, "__version__", version)


def trains_under(version: str) -> dict[str, Any]:
    said: list[str] = []
    torch.manual_seed(1)
    with under(version), mock.patch("syncline.train.planned_training.warn", said.append):
        twins = Twins(Plain(), OPTIMIZERS["adamw"], overlaps=True, overlap_optimizers=True)
        twins.train(4)
        _, refused = error_of(lambda: DistributedDataParallel(Plain(), compression="bfloat16"))
    return {
        "differing": differing(*twins.pairs),
        "phase": twins.ours.phase,
        "deferred": "step" in vars(twins.pairs[0][1]),
        "said": said,
        "compression": refused,
    }


def refuses_under(version: str) -> list[str]:
    stock = TorchDDP(Plain())
    with under(version):
        _, constructor = error_of(lambda: DistributedDataParallel(Plain()))
        _, convert = error_of(lambda: DistributedDataParallel.convert(stock))
    return [constructor, convert]


def refuses_on_one(version: str) -> str:
    """Return what all ranks say where rank 1 has another torch."""
    with under(version if dist.get_rank() == 1 else torch.__version__):
        return error_of(lambda: DistributedDataParallel(Plain()))[1]


def test_a_newer_torch_trains_as_ddp(workers: WorkerPool) -> None:
    for result in workers.run(trains_under, 2, "2.16.0"):
        assert result["differing"] == []
        assert result["phase"] == "steady"
        assert not result["deferred"]
        assert result["compression"].startswith("gradients cannot be compressed here: torch 2.16.0")
        (said,) = result["said"]
        assert said.startswith("training with DDP's buckets: torch 2.16.0 is newer than those")
        assert f"is for torch{TORCH}: install one of these" in said


def test_an_older_torch_is_refused(workers: WorkerPool) -> None:
    for messages in workers.run(refuses_under, 2, "2.10.0"):
        for message in messages:  # of the constructor, and of convert
            assert message.startswith("torch 2.10.0 is older than those that")
            assert f"is for torch{TORCH}: install one of these" in message
            assert message.endswith("or use torch.nn.parallel.DistributedDataParallel")


def test_ranks_with_different_torches(workers: WorkerPool) -> None:
    for message in workers.run(refuses_on_one, 2, "2.16.0"):
        assert "torch" in message
        assert "2.16.0 on rank 1 and tried on rank 0" in message
