"""The loops of well-known scripts, in our own code and as small as they can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.train.overlap.loop import Loop, no_shards
from tests.train.overlap.overlap_models import CLASSES, FEATURES, Net, batch, loss_of
from tests.train.overlap.overlap_rig import Side
from tests.train.overlap.parts import reloaded


def _decaying(ddp: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return groups: matrices, whose values decay, and vectors."""
    return [
        {"params": [p for p in ddp.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in ddp.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def _mixed(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    share = 0.1 + 0.8 * (step % 7) / 7
    mixed = inputs * share + inputs.roll(1, 0) * (1 - share)
    soft = nn.functional.one_hot(targets, CLASSES).float()
    soft = soft * share + soft.roll(1, 0) * (1 - share)
    return cross_entropy(model(mixed), soft, label_smoothing=0.1)


def imagenet(side: Side) -> None:
    ddp = side.wrap(Net(), lambda m: _mixed(m, 0))
    groups = _decaying(ddp, 1e-3)
    optimizer = side.overlap(ddp, SGD(groups, lr=0.2, momentum=0.9, nesterov=True))
    parts = [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 20)]
    schedule = SequentialLR(optimizer, parts, milestones=[5])
    average = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in side.steps:
        loss = _mixed(ddp, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 4 == 0:
            average.update_parameters(ddp.module)
        if step % 8 == 7:
            ddp.eval()
            with torch.inference_mode():
                side.note("evaluated", loss_of(ddp, step), loss_of(average, step))
            ddp.train()
            saved = [ddp.module, optimizer, average]
            for what, state in zip(saved, reloaded([s.state_dict() for s in saved]), strict=True):
                what.load_state_dict(state)
    side.finish(ddp, optimizer)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.rest = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        wider, narrower = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(wider, nn.GELU(), narrower)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        return x + self.mlp(self.rest(x))


class Language(nn.Module):
    """A transformer whose first and last layers share their weight."""

    def __init__(self, words: int = 17, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(words)))


def _words(model: nn.Module, step: int, micro: int = 0) -> torch.Tensor:
    words = (batch(step, micro)[0].abs() * 8).long().clamp(max=16)
    return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def language(side: Side) -> None:
    ddp = side.wrap(Language(), lambda m: _words(m, 0))
    optimizer = side.overlap(ddp, AdamW(_decaying(ddp, 0.1), lr=0.01, betas=(0.9, 0.95)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
    for step in side.steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (step + 1) / 10)
        for micro in range(3):
            ddp.require_backward_grad_sync = micro == 2
            scaler.scale(_words(ddp, step, micro) / 3).backward()
        scaler.unscale_(optimizer)
        # Not above the limit: Adam turns the last bit of the keys' biases, whose gradients would be
        # zero without rounding, into a step of full length.
        nn.utils.clip_grad_norm_(ddp.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        side.note("scale", scaler.get_scale())
        if step % 9 == 8:
            ddp.eval()
            with torch.no_grad():
                side.note("evaluated", _words(ddp, step))
            ddp.train()
    side.finish(ddp, optimizer)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.actor(hidden), self.critic(hidden)


def _ppo_loss(model: nn.Module, step: int, old: torch.Tensor) -> torch.Tensor:
    inputs, actions = batch(step)
    logits, value = model(inputs)
    chosen = logits.log_softmax(-1).gather(1, actions[:, None])
    ratio = (chosen - old).exp()
    gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
    return mse_loss(value, inputs.sum(1, keepdim=True)) - gain


def ppo(side: Side) -> None:
    old = torch.zeros(4, 1)
    ddp = side.wrap(ActorCritic(), lambda m: _ppo_loss(m, 0, old))
    optimizer = side.overlap(ddp, Adam(ddp.parameters(), lr=0.01, eps=1e-5))
    for step in side.steps:
        if step % 4 == 0:
            with torch.no_grad():
                inputs, actions = batch(step)
                old = ddp(inputs)[0].log_softmax(-1).gather(1, actions[:, None])
        loss = _ppo_loss(ddp, step, old)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()
        side.note("loss", loss)
    side.finish(ddp, optimizer)


class LowRank(nn.Module):
    """A frozen layer, and two small matrices that are trained beside it (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def lora(side: Side) -> None:
    net: Any = Net().requires_grad_(False)
    net.enter, net.hidden = LowRank(net.enter), LowRank(net.hidden)
    ddp = side.wrap(net, loss_of)
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = side.overlap(ddp, AdamW(trained, lr=0.02))
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step / 10))
    for step in side.steps:
        loss = loss_of(ddp, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            with torch.no_grad():
                side.note("compared", loss_of(net, step), net.enter.layer.weight)
    side.finish(ddp, optimizer)


SCENARIOS = {
    "an image classifier's script: mixup, label smoothing, warm-up, an average of the weights "
    "every fourth step, evaluation, a checkpoint that is loaded again": no_shards(whole=imagenet),
    "a language model's script (nanoGPT): `require_backward_grad_sync`, clipping, `GradScaler`, "
    "decay for matrices only, shared embedding": Loop(whole=language, norm="2"),
    "reinforcement learning (PPO): rollouts without gradients, several backward passes and steps "
    "for each, clipping": Loop(whole=ppo, norm="2", near=True),
    "fine-tuning with most parameters frozen (LoRA)": Loop(whole=lora),
}
