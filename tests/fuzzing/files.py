"""The kinds of files that are fuzzed: small valid ones, and the commands that read them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from syncline.comm.groups.choices import Timing
from syncline.files.report.advice import advice
from syncline.files.report.bundle import DOCUMENTS
from syncline.files.report.summary import summarise
from syncline.files.traces.formats import FORMATS
from syncline.plan.advice import Interface, RankFacts
from syncline.plan.document import Document
from syncline.plan.network import PRESETS
from syncline.plan.planners import PLANNERS, planned
from syncline.plan.simulator.whatif import changes
from tests.comm.groups.choice_examples import choices
from tests.files.report.examples import make_bundle
from tests.files.report.whatif_examples import bundle_of, few, single
from tests.files.traces import kineto_seeds
from tests.files.traces.seeds import layered_profile
from tests.files.traces.seeds import seeds as traces
from tests.lab.bench.examples import BENCHMARK
from tests.lab.replay.examples import replay

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


NETWORK = "10gbe-k80"
Command = tuple[str, Sequence[str] | Callable[[], None]]
"""Its name in the counts, and its arguments, or a call that does the same."""


class Kind(NamedTuple):
    """A kind of file."""

    name: str
    seeds: Callable[[], list[bytes]]
    file: str  # where it lies in a folder
    commands: Callable[[Path, Path, int], list[Command]]
    """Of the file, a folder for outputs and the number of the input, which varies options."""


def _document(document: Document) -> bytes:
    return document.to_json().encode()


def _show(file: Path) -> list[Command]:
    return [("show", ["show", str(file)]), ("show --json", ["show", str(file), "--json"])]


def _report(file: Path, out: Path) -> list[Command]:
    page = out / "page.html"
    return [("report", ["report", str(file.parent), "--output", str(page), "--json"])]


def _train(option: str, file: Path, number: int) -> list[Command]:
    # Building the model takes a hundred times as long as refusing most files.
    if number % 50:
        return []
    return [(f"train {option}", ["train", option, str(file), "--steps", "1"])]


def _planner(number: int) -> str:
    return list(PLANNERS)[number % len(PLANNERS)]


def _profile(file: Path, out: Path, number: int) -> list[Command]:
    f, planner = str(file), _planner(number)
    found: list[Command] = [
        *_show(file),
        ("plan", ["plan", f, NETWORK, "--planner", planner, "-o", str(out / "plan.json")]),
        ("simulate", ["simulate", f, NETWORK, "--planner", planner]),
        *_trace(file, out, number),
        *_report(file, out),
        *_train("--profile", file, number),
    ]
    if number % 10 == 0:
        sweep = ["--workers", "2,4,8", "--planner", "ddp,merge", "--report", str(out / "w.html")]
        found.append(("simulate --workers", ["simulate", f, NETWORK, *sweep]))
        found.append(("replay", ["replay", f, "--planner", "ddp", "--scale-compute", "0.5"]))
    return found


def _network(file: Path, out: Path, number: int) -> list[Command]:
    f, profile, planner = str(file), str(_partner(out, "profile")), _planner(number)
    change = (["--workers", "7"], ["--algorithm", "ring"], ["--bandwidth", "1gbit,10gbit"])
    return [
        *_show(file),
        ("plan", ["plan", profile, f, "--planner", planner]),
        ("simulate", ["simulate", profile, f, "--planner", planner]),
        ("simulate, changed", ["simulate", profile, f, "--planner", "merge", *change[number % 3]]),
        *_report(file, out),
        *_train("--network", file, number),
    ]


def _plan(file: Path, out: Path, number: int) -> list[Command]:
    profile = str(_partner(out, "profile"))
    return [
        *_show(file),
        ("simulate --plan", ["simulate", profile, NETWORK, "--plan", str(file), "--json"]),
        *_report(file, out),
        *_train("--plan", file, number),
    ]


def _timeline(file: Path, out: Path, number: int) -> list[Command]:
    return [*_show(file), *_trace(file, out, number), *_report(file, out)]


def _reported(file: Path, out: Path, number: int) -> list[Command]:
    return [*_show(file), *_report(file, out)]


def _shown(file: Path, out: Path, number: int) -> list[Command]:
    return _show(file)


def _choices(file: Path, out: Path, number: int) -> list[Command]:
    # The cache that XDG_CACHE_HOME names; see the runner.
    return [*_show(file), ("tune --show", ["tune", "--show", "--page", str(out / "c.html")])]


def _trace(file: Path, out: Path, number: int) -> list[Command]:
    f = str(file)
    targets = [form.name for form in FORMATS.values() if form.write is not None]
    to = targets[number % len(targets)]
    outputs = ["-o", str(out / "trace"), "--network-out", str(out / "network.json")]
    found: list[Command] = [
        ("trace info", ["trace", "info", f]),
        ("trace convert", ["trace", "convert", f, "--to", to, "--workers", "2", *outputs]),
        ("simulate", ["simulate", f, NETWORK, "--planner", "merge"]),
    ]
    for form, other in (("kineto", "execution-trace"), ("execution-trace", "kineto")):
        if file.name == form:
            joined = ["trace", "info", f, str(_partner(out, other))]
            found.append((f"trace info with {other}", joined))
    return found


@cache
def _partner(out: Path, name: str) -> Path:
    """Return a valid file that some commands want beside the fuzzed one."""
    path = out / f"partner-{name}"
    content = {
        "profile": lambda: _document(layered_profile()),
        "kineto": kineto_seeds.kineto,
        "execution-trace": kineto_seeds.execution_trace,
    }[name]()
    path.write_bytes(content)
    return path


def _seed(field: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        found = [_document(getattr(make_bundle(), field))]
        if field == "profile":
            found.append(_document(layered_profile()))
        if field == "network":
            found += [_document(network) for network in PRESETS.values()]
        if field == "plan":  # those that ``simulate --plan`` accepts
            profile, network = layered_profile(), PRESETS[NETWORK]
            found += [_document(planned(name, profile, network)) for name in ("merge", "overlap")]
        return found

    return seeds


def _what_ifs() -> list[bytes]:
    rates = [125e6, 1.25e9, 3.125e9]
    swept = bundle_of(
        changes(workers=[4, 16, 64, 256], bandwidth_bytes_per_s=rates), "ddp", "merge"
    )
    bundles = (swept, few(), single())
    return [_document(b.what_if) for b in bundles if b.what_if is not None]


def _advised() -> list[bytes]:
    rank = RankFacts(rank=0, host="host0", interface=Interface(name="eth0", mtu_bytes=1500))
    return [_document(advice(layered_profile(), PRESETS["10gbit"], [rank]))]


def _measured_choices() -> list[bytes]:
    timings = tuple(
        Timing(collective="all-reduce", size_bytes=n, algorithm=a, rounds_s=(1e-5, 2e-5))
        for n in (256, 4096)
        for a in ("ring", "direct")
    )
    return [_document(choices(timings=timings))]


# --- checkpoints ---

CONFIG = {"model": "resnet20", "data": "digits"}
COMPRESSION = "compression-7-0.pt"


def _model() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    # Without a backward pass: its threads would not survive the fork of the runner.
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def _checkpoints() -> list[bytes]:
    """Return a checkpoint of one worker and a small model."""
    import torch

    from syncline.lab.training.checkpoint import FILE_NAME, Checkpoint, settings_of
    from syncline.lab.training.config import TrainingConfig
    from syncline.lab.training.replica import scheduler, sgd

    torch.manual_seed(0)
    config, model = TrainingConfig.of(**CONFIG, workers=1), _model()
    optimizer = sgd(model, config)
    schedule = scheduler(optimizer, 7, config.hyper)
    for _ in range(7):
        _step(model, optimizer)
        schedule.step()
    made = Checkpoint(
        settings=settings_of(config, 10),
        epoch=1,
        step=7,
        weights=dict(model.state_dict()),
        optimizer=optimizer.state_dict(),
        random_states=[[torch.get_rng_state()]],
    )
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder))
        return [(Path(folder) / FILE_NAME).read_bytes()]


def _resume(file: Path) -> None:
    """Do with a checkpoint what ``syncline train --resume`` does, without workers."""
    import torch

    from syncline.lab.training.checkpoint import load_checkpoint
    from syncline.lab.training.config import TrainingConfig
    from syncline.lab.training.replica import set_random_state, sgd

    config, model = TrainingConfig.of(**CONFIG, workers=1), _model()
    path, checkpoint = load_checkpoint(file.parent)
    checkpoint.check(path, config, 10, model)
    model.load_state_dict(checkpoint.weights)
    optimizer = sgd(model, config)
    checkpoint.load_optimizer(optimizer)
    set_random_state(checkpoint.random_states[0], torch.device("cpu"))
    model(torch.randn(4, 3))
    _step(model, optimizer)


def _states() -> list[bytes]:
    """Return what compression leaves behind, of a sparse exchange and of one in 16 bits."""
    import msgspec
    import torch

    from syncline.lab.training.residuals import save_state
    from syncline.plan.recipe import Recipe
    from syncline.train.sparse.session import VERSION

    torch.manual_seed(0)
    common = {"decided": False, "plan": None}
    rounded = {"compression": "bf16", "steps": 7, **common}
    sparse = {
        "version": VERSION,
        "recipe": msgspec.to_builtins(Recipe(density=0.1, warmup=(0.5,), warmup_steps=3)),
        "ranks": 1,
        "rank": 0,
        "step": 7,
        "scale": 1.0,
        "residuals": {"w": torch.randn(6), "b": torch.randn(2)},
        "velocities": {"w": torch.randn(6), "b": torch.randn(2)},
        "rates": {"w": 0.1},
        **common,
    }
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for state in (rounded, sparse):
            save_state(Path(folder) / COMPRESSION, state)
            made.append((Path(folder) / COMPRESSION).read_bytes())
    return made


def _load_states(file: Path, workers: int) -> None:
    """Load a state of compression as ``syncline train --resume`` does, for so many workers."""
    from syncline.lab.training.residuals import load_state
    from syncline.plan.recipe import Recipe
    from syncline.train.sparse.memory import HostMemory
    from syncline.train.sparse.residuals import Residuals

    state = load_state(file.parent, [file.name], rank=0, workers=workers, steps_per_epoch=7)
    if "recipe" in state:
        recipe = Recipe(density=0.1, momentum=0.9)
        own = Residuals(recipe, {"w": 6, "b": 2}, HostMemory())
        own.load_state_dict(state)


def _resumed(file: Path, out: Path, number: int) -> list[Command]:
    return [("train --resume", lambda: _resume(file))]


def _state_read(file: Path, out: Path, number: int) -> list[Command]:
    workers = 1 + number % 3
    return [("train --resume --compression", lambda: _load_states(file, workers))]


# --- all of them ---


def _kinds() -> Iterator[Kind]:
    for field, commands in (
        ("run", _reported),
        ("profile", _profile),
        ("network", _network),
        ("plan", _plan),
        ("comparison", _reported),
        ("timeline_predicted", _timeline),
        ("timeline_measured", _timeline),
    ):
        name, noun = DOCUMENTS[field]
        kind = noun.KIND if noun.KIND != "timeline" else Path(name).stem
        yield Kind(kind, _seed(field), name, commands)
    yield Kind("what-if", _what_ifs, DOCUMENTS["what_if"][0], _reported)
    yield Kind("replay", lambda: [_document(replay())], "replay.json", _shown)
    yield Kind("advice", _advised, "advice.json", _shown)
    yield Kind("collectives", lambda: [_document(BENCHMARK)], "collectives.json", _shown)
    yield Kind("choices", _measured_choices, "syncline/choices/site.json", _choices)
    yield Kind("report", lambda: [_document(summarise(make_bundle()))], "report.json", _shown)
    for name, content in traces().items():
        if name != "json":
            yield Kind(name, lambda content=content: content, name, _trace)  # type: ignore[misc]
    yield Kind("checkpoint", _checkpoints, "checkpoint.pt", _resumed)
    yield Kind("compression", _states, COMPRESSION, _state_read)


KINDS: dict[str, Kind] = {kind.name: kind for kind in _kinds()}
"""Every kind of file that a command reads, by name."""
