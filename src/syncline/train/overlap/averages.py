"""Averages of the weights: each is updated right after its parameter."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from syncline.errors import UserError
from syncline.torch_private import disable_dynamo, eval_frame_callback
from syncline.train.overlap.deferral import AverageUpdate, Deferral
from syncline.train.overlap.pending import UPDATES, is_pending, owner_of

PLAIN = (torch.Tensor, nn.Parameter)  # the classes of averages that can be made pending


def average(
    averages: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor], update: AverageUpdate
) -> None:
    """Update averages: now, or after the parameter's own update if that is deferred.

    ``update`` is called for some averages at a time. It must not depend on mutable state.
    """
    now: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    later: dict[Deferral, dict[int, torch.Tensor]] = {}
    with UPDATES:
        for mean, parameter in zip(averages, parameters, strict=False):  # as torch pairs them
            owner = owner_of(parameter) if is_pending(parameter) else None
            if (
                isinstance(owner, Deferral)
                and owner.guard is None
                and owner.is_deferred(parameter)
                and type(mean) in PLAIN
            ):
                later.setdefault(owner, {})[owner.index_of[id(parameter)]] = mean
            else:
                now[0].append(mean)
                now[1].append(parameter)
        for owner, chosen in later.items():
            owner.average(chosen, update)
    update(*now)


def average_weights(module: nn.Module, averages: Iterable[torch.Tensor], weight: float) -> None:
    """Move averages towards a module's parameters by ``weight``; a UserError if they do not fit."""
    averages, parameters = list(averages), list(module.parameters())
    if len(averages) != len(parameters):
        raise UserError(
            f"expected an average for each of the {len(parameters)} parameters, found "
            f"{len(averages)}; give one for each of module.parameters(), in their order"
        )
    for number, (mean, parameter) in enumerate(zip(averages, parameters, strict=True)):
        if mean.shape != parameter.shape:
            raise UserError(
                f"expected shape {tuple(parameter.shape)} of average {number}, as its "
                f"parameter has, found {tuple(mean.shape)}; give one for each of "
                "module.parameters(), in their order"
            )

    @torch.no_grad()
    def update(some: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
        for mean, parameter in zip(some, parameters, strict=True):
            mean.lerp_(parameter.to(mean), weight)

    average(averages, parameters, update)


def average_with_torch() -> None:
    """Patch ``AveragedModel.update_parameters`` to average each parameter after its update.

    Torch's own code is called for a few parameters at a time. In compiled code, and with the user's
    own averaging function, it is called once for all, and so waits for all updates.
    """
    own: Any = AveragedModel.update_parameters
    if own.__module__ == __name__:
        return

    @disable_dynamo(recursive=False)
    @functools.wraps(own)
    def update_parameters(self: Any, model: nn.Module) -> None:
        # Checked here: in any function called from here, the callback would be None.
        if eval_frame_callback() is not None or not _average_in_parts(own, self, model):
            own(self, model)

    update_parameters.__module__ = __name__
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


@disable_dynamo
def _average_in_parts(own: Any, mean: Any, model: nn.Module) -> bool:
    """Average each parameter once it is updated; False if all must be averaged at once."""
    functions = (mean.avg_fn, mean.multi_avg_fn)
    known = all(f is None or f.__module__ == AveragedModel.__module__ for f in functions)
    if not known or not any(map(is_pending, model.parameters())):
        return False
    count = mean.n_averaged.clone()

    def stand_in(tensors: Iterable[torch.Tensor]) -> Any:
        """Return a stand-in for a model, averaged or not, that has these parameters."""
        parts: Any = {"parameters": lambda: iter(tensors), "buffers": lambda: iter(())}
        return SimpleNamespace(
            **parts,
            module=SimpleNamespace(**parts),
            use_buffers=False,
            n_averaged=count.clone(),
            avg_fn=functions[0],
            multi_avg_fn=functions[1],
        )

    def update(averages: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
        if averages:
            own(stand_in(averages), stand_in(parameters))

    def buffers(of: nn.Module) -> Iterable[torch.Tensor]:
        return of.buffers() if mean.use_buffers else ()

    average(
        itertools.chain(mean.module.parameters(), buffers(mean.module)),
        itertools.chain(model.parameters(), buffers(model)),
        update,
    )
    if not mean.use_buffers:
        for copy, buffer in zip(mean.module.buffers(), model.buffers(), strict=True):
            copy.detach().copy_(buffer.detach())
    mean.n_averaged += 1
    return True
