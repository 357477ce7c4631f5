"""What becomes of the rows of the table of features where optimizers are sharded."""

from __future__ import annotations

__all__ = ["MEANING", "REFUSED", "sharded"]

REFUSED = frozenset(
    {
        "Adafactor",
        "Muon",
        "An optimizer whose update depends on other parameters",
        "An optimizer that clips by the norm of all gradients after a warm-up",
        "the same, its state loaded in between",
        "an optimizer's threshold for all gradients, set in mid-training",
        "an attribute of your own optimizer, set in mid-training, with that effect",
        "An optimizer that skips a step where a gradient is not finite",
        "An optimizer that draws random numbers",
        "LBFGS",
        "A hook on the optimizer's step, from then on",
        "`step` replaced by a function of your own before `overlap`",
        "An optimizer around another, with steps of its own (SAM)",
        "`ZeroRedundancyOptimizer`",
        "never `zero_grad`: gradients add up",
        "a `no_sync` pass after the exchanged one, before `step`",
        "two backward passes through one graph, the second not exchanged",
        "a new optimizer in mid-training, not overlapped",
        "two steps in a row",
        "`state_dict` of model and optimizer between steps",
        "`load_state_dict` of model and optimizer between steps",
        "`join` in between",
        "`join` in between, `static_graph=True`, accumulation from the second step on",
        "`join` and `Join` with `enable=False` around all steps",
        "`p.grad` read after `step`",
        "`p.grad` read after `step`, every tenth step",
        "`p.grad` changed in place after `step`",
        "the gradients of the last step kept, and read after the next",
        "tensor parallelism in the model (`device_mesh=`)",
        "`torch.compile` of a function that calls `optimizer.step`",
        "`torch.compile` of `optimizer.step`",
        "`torch.compile` of `optimizer.step` before `overlap`",
        "the model exported, traced or scripted in between",
        "two models with an optimizer each (a GAN)",
        "two models, one of them overlapped",
        "one optimizer over two models",
        "two optimizers on one model, one overlapped and stepped first",
        "two optimizers on one model, one overlapped and stepped last",
        "two wrapped models that share a part, trained in turns",
        "`torch.save` in a thread after `step`, which the script waits for",
        "`p.grad` in a thread after `step`, which the script waits for",
        "the same, every tenth step",
        "`torch.distributed.checkpoint.async_save` after `step`, every tenth step",
        "an image classifier's script: mixup, label smoothing, warm-up, an average of the "
        "weights every fourth step, evaluation, a checkpoint that is loaded again",
    }
)
"""They raise, and say why: the script, or what collects the state of what it did not shard."""
SHARES = frozenset(
    {
        "`torch.save` of the whole model, the wrapper, the optimizer",
        "`copy.deepcopy` of model and optimizer in between",
        "the optimizer's state read after `step`",
        '`vars(optimizer)["state"]` read after `step`',
        "the optimizer's state changed in between",
        "the optimizer pickled and copied after `step`",
        "`safetensors` in a thread after `step`, which the script waits for",
        "`optimizer.state` in a thread after `step`, which the script waits for",
        "weights, state and averages copied in a thread until the next `step`",
    }
)
ROUNDED = frozenset(
    {
        "a model in bfloat16",
        "parameters of one element, of none, without dimensions",
    }
)
MEANING = {
    "trains": "values are those of DDP, within a relative 1e-6; `step`, or code that reads a "
    "value, may wait where it does not with overlap alone",
    "refused": "a `UserError` says why",
    "sees shares": "it reads the optimizer's state, of which each rank has only a share",
    "rounds differently": "16-bit values are rounded differently, and parameters without elements "
    "have no state",
}


def sharded(row: str) -> str:
    """Return what becomes of a row."""
    groups = {"refused": REFUSED, "sees shares": SHARES, "rounds differently": ROUNDED}
    return next((name for name, rows in groups.items() if row in rows), "trains")


"""They come to what DDP comes to, within a relative 1e-6."""
