"""Frameworks with Syncline's adapters beside the same frameworks with DDP.

Emulated hosts train a small transformer with real computing, in turns: Lightning with validation
and clipping, the Hugging Face Trainer with its defaults, and the loop of nanoGPT; in ``mixed`` the
latter with weights in bfloat16 and norms in float32. In ``unused`` one head is not used, layers are
registered as in DETR (what runs first comes last), and no optimizer overlaps: what differs from
DDP, which does not rebuild its buckets of 1 MiB then, is the order of the messages.

By default there are as many hosts as cores, and the links have a rate at which exchange and
computing take about equally long. One measured run makes the plan of each framework; the timed runs
begin with it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import syncline
from benchmarks.common import median, save, spread
from syncline.lab.testbed import Cluster, Testbed
from syncline.plan.plan import Plan
from syncline.plan.run import Run

FRAMEWORKS = ("lightning", "transformers", "nanogpt")
WORDS, LENGTH, WIDTH, LAYERS, BATCH = 256, 64, 128, 4, 32
MEASURED_STEPS = 400
"""Enough for Syncline to measure and try plans."""
WARM_UP = 6
"""Steps at the start of a timed run that are not counted."""
DEADLINE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frameworks", nargs="+", default=FRAMEWORKS, choices=TRAINED)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="150mbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--work", nargs=4, metavar=("FRAMEWORK", "KIND", "STEPS", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.work:
        framework, kind, steps, folder = arguments.work
        work(framework, kind, int(steps), Path(folder))
        return
    rows = {}
    with Testbed(Cluster.of(hosts=arguments.hosts, rate=arguments.rate)) as bed:
        for framework in arguments.frameworks:
            rows[framework] = contest(bed, framework, arguments)
    settings = {"hosts": arguments.hosts, "rate": arguments.rate, "steps": arguments.steps}
    name = "frameworks" if arguments.hosts == 2 else f"frameworks_{arguments.hosts}_hosts"
    extra = [each for each in arguments.frameworks if each not in FRAMEWORKS]
    name += "".join(f"_{each}" for each in extra)
    save(name, {"settings": settings, "rows": rows}, module="frameworks")


def contest(bed: Testbed, framework: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Make a plan, then train with it and with DDP, interleaved."""
    with tempfile.TemporaryDirectory() as folder:
        run(bed, framework, "measured", MEASURED_STEPS, folder)
        record = Run.load(Path(folder) / "report" / "run.json")
        print(f"{framework}: {record.decision} {record.planner}, {record.reason}", flush=True)
        times: dict[str, list[float]] = {"stock": [], "planned": []}
        losses: dict[str, float] = {}
        for _ in range(arguments.rounds):
            for kind in times:
                result = run(bed, framework, kind, arguments.steps, folder)
                times[kind].append(result["step_s"])
                losses[kind] = result["loss"]
    gains = [stock / ours for stock, ours in zip(times["stock"], times["planned"], strict=True)]
    print(
        f"{framework}: DDP {spread(times['stock'])} s a step, Syncline "
        f"{spread(times['planned'])} s, {spread(gains)} times as fast; last losses {losses}",
        flush=True,
    )
    return {
        "planner": record.planner,
        "deferred": record.deferred,
        "predicted_s": record.predicted_planned_s,
        "times_s": times,
        "gain": median(gains),
        "losses": losses,
    }


def run(bed: Testbed, framework: str, kind: str, steps: int, folder: str) -> dict[str, Any]:
    result = bed.run(
        [
            sys.executable,
            "-m",
            "benchmarks.frameworks",
            "--work",
            framework,
            kind,
            str(steps),
            folder,
        ],
        environment={"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        timeout_s=DEADLINE_S,
    )
    if result.exit_code:
        raise SystemExit(f"the workers failed: {''.join(result.stderr)[-3000:]}")
    noted: dict[str, Any] = json.loads((Path(folder) / f"{kind}.json").read_text())
    return noted


# ------------------------------------------------------------------ on every worker


def work(framework: str, kind: str, steps: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    options: dict[str, Any] = {"cache": False}
    if kind == "planned":
        options = {"plan": Plan.load(folder / "report" / "plan.json"), "check": False}
    ends_s, loss, report = TRAINED[framework](kind != "stock", options, steps, folder)
    if os.environ["RANK"] == "0":
        step_s = median([b - a for a, b in pairwise(ends_s[WARM_UP:])])
        (folder / f"{kind}.json").write_text(json.dumps({"step_s": step_s, "loss": loss}))
        if kind == "measured":
            report.rename(folder / "report")


class Norm(nn.LayerNorm):
    """A normalisation in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised states, in the type of the given ones."""
        return super().forward(x.float()).to(x.dtype)


class Block(nn.Module):
    """Attention and a perceptron, each with its normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rest = Norm(WIDTH), Norm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states after this block, of shape (batch, letters, WIDTH)."""
        normal = self.norm(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        return x + self.mlp(self.rest(x))


class Language(nn.Module):
    """A transformer that predicts letters; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each letter from those before it."""
        x = self.embedding(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).float().flatten(0, 1), words[:, 1:].flatten())


def mixed_language() -> Language:
    """Return a model with weights in bfloat16 and norms in float32."""
    model = Language().bfloat16()
    for part in model.modules():
        if isinstance(part, Norm):
            part.float()
    return model


def unused_language() -> Language:
    """Return a model whose first layers are registered last, with a head that nothing uses."""
    model = Language()
    model.spare = nn.Linear(WIDTH, WORDS)
    for name in ("blocks", "embedding"):
        layers = getattr(model, name)
        delattr(model, name)
        setattr(model, name, layers)
    return model


def words_of(steps: int) -> torch.Tensor:
    """Return lines of text for every step of every worker, of shape (lines, LENGTH)."""
    text = Path(__file__).read_bytes()
    letters = torch.tensor(list(text)).clamp(max=WORDS - 1)
    starts = (
        torch.arange(steps * BATCH * int(os.environ["WORLD_SIZE"])) * 97 % (len(letters) - LENGTH)
    )
    return torch.stack([letters[start : start + LENGTH] for start in starts])


Trained = tuple[list[float], float, Path]
"""When each step ended, the last loss, and where the report is."""


def nanogpt(
    ours: bool,
    options: dict[str, Any],
    steps: int,
    folder: Path,
    *,
    made: Callable[[], nn.Module] = Language,
    overlaps: bool = True,
    **settings: Any,
) -> Trained:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model: Any
    if ours:
        model = syncline.DistributedDataParallel(made(), **settings, **options)
    else:
        model = nn.parallel.DistributedDataParallel(made(), **settings)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    optimizer = model.overlap(optimizer) if ours and overlaps else optimizer
    lines = words_of(steps)[rank :: torch.distributed.get_world_size()]
    ends_s, loss = [], torch.zeros(())
    for step in range(steps):
        loss = model(lines[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ends_s.append(time.perf_counter())
    if ours and rank == 0:
        model.save_report(folder / "nanogpt")
    return ends_s, float(loss), folder / "nanogpt"


def transformers(ours: bool, options: dict[str, Any], steps: int, folder: Path) -> Trained:
    import transformers as hf

    from syncline.integrations.transformers import SynclineCallback

    ends_s: list[float] = []

    class Watch(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends_s.append(time.perf_counter())

    config = hf.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=4
    )
    trainer = hf.Trainer(
        model=hf.GPT2LMHeadModel(config),
        train_dataset=[{"input_ids": line, "labels": line} for line in words_of(steps)],
        callbacks=[Watch()],
        args=hf.TrainingArguments(
            output_dir=str(folder / "hf"),
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    if ours:
        trainer.add_callback(SynclineCallback(trainer, **options))
    trainer.train()
    return ends_s, trainer.state.log_history[-1]["train_loss"], folder / "hf" / "syncline"


def lightning(ours: bool, options: dict[str, Any], steps: int, folder: Path) -> Trained:
    import lightning as pl
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from syncline.integrations.lightning import SynclineStrategy

    ends_s: list[float] = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Language()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("checked", self.net(batch[0]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, *_: Any) -> None:
            ends_s.append(time.perf_counter())

    lines = words_of(steps)
    trainer = pl.Trainer(
        strategy=SynclineStrategy(**options) if ours else DDPStrategy(),
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        gradient_clip_val=1.0,
        val_check_interval=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / "lightning",
    )
    checks = DataLoader(TensorDataset(lines[: 4 * BATCH]), BATCH)
    trainer.fit(Model(), DataLoader(TensorDataset(lines), BATCH), checks)
    return ends_s, float(trainer.callback_metrics["loss"]), folder / "lightning" / "syncline"


TRAINED = {
    "lightning": lightning,
    "transformers": transformers,
    "nanogpt": nanogpt,
    "mixed": functools.partial(nanogpt, made=mixed_language),
    "unused": functools.partial(
        nanogpt,
        made=unused_language,
        overlaps=False,
        find_unused_parameters=True,
        bucket_cap_mb=1,
    ),
}

if __name__ == "__main__":
    main()
