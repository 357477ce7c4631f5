"""What ranks that may die run: overlapped training in which something goes wrong."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import io
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from syncline.errors import SynclineError
from syncline.plan.plan import Wait
from syncline.train import reducer, shutdown
from syncline.train.ddp import DistributedDataParallel, planned_training
from syncline.train.engine import dense_transport
from syncline.train.engine.dense_transport import DenseTransport
from syncline.train.engine.engine import Engine
from syncline.train.measure.exchange import new_group_like
from syncline.train.measure.keepalive import keepalive
from tests.mortal import Place
from tests.timeouts import DEADLINE_S, TIMEOUT, give_up, wait_until
from tests.train.overlap.overlap_plans import Style, plan_of

SHORT_TIMEOUT_S = 4.0  # where a rank falls silent, from that moment on
LAYERS = 4
WIDTH = 32
WARM = 11  # steps after which exchanges certainly run on under the next forward pass


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def join(place: Place, backend: str = "gloo") -> None:
    store = f"file://{place.folder}/store"
    dist.init_process_group(backend, store, TIMEOUT, place.ranks, place.rank)
    torch.manual_seed(0)


class Training:
    """Overlapped training of ``Net``, with a message for each layer, the first layer's first."""

    def __init__(
        self,
        place: Place,
        *,
        held_s: float = 0.0,
        wait: Wait = "need",
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        self.place = place

        def kept(*args: Any, **how: Any) -> dist.ProcessGroup:
            self.group = new_group_like(*args, **how)  # the engine's
            return self.group

        self.net = Net()
        ready = [name for name, _ in self.net.named_parameters()][::-1]
        style = Style(piece_elements=WIDTH * WIDTH + WIDTH, delay_s=held_s, wait=wait)
        plan = plan_of(self.net, ready, place.ranks, style)
        with mock.patch.object(reducer, "new_group_like", kept):
            self.model = DistributedDataParallel(self.net, plan=plan, check=False)
        self.optimizer = make(self.model.parameters(), lr=0.05, momentum=0.9)
        self.model.overlap(self.optimizer)
        self.done = 0

    def inputs(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.done + self.place.rank)
        return torch.randn(5, WIDTH, generator=generator)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs()).square().mean().backward()

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.done += 1

    @contextlib.contextmanager
    def pending_step(self) -> Iterator[None]:
        """Make a step whose messages no rank sends before its body has ended."""
        sends = threading.Event()
        self.hold(sends.wait)
        self.step()
        assert self.pending
        yield
        sends.set()

    def hold(self, until: Callable[[], object]) -> None:
        """Hold back the messages of the next steps until a call has returned.

        The updates of all ranks are pending for as long as one rank holds its messages back.
        """
        self.model.synchronize()
        send = DenseTransport.send

        def held(*args: Any) -> Any:
            until()
            return send(*args)

        DenseTransport.send = held  # type: ignore[method-assign]

    def expect_answers(self, within_s: float) -> None:
        """Shorten the timeout of the exchange, once all ranks have come as far."""
        self.model.synchronize()
        dist.barrier()
        planned_training(self.model).deferral.engine.timeout_s = within_s
        give_up(self.group, within_s)

    @property
    def pending(self) -> bool:
        """Whether an update is deferred, told without reading it."""
        return any(type(p) is not nn.Parameter for p in self.net.parameters())


def begin(place: Place, steps: int = WARM, backend: str = "gloo", **how: Any) -> Training:
    """Join the process group, and train until exchanges run on under the next forward pass."""
    join(place, backend)
    training = Training(place, **how)
    training.step(steps)
    return training


def values(net: nn.Module) -> list[float]:
    return [float(v) for p in net.parameters() for v in p.detach().flatten()[:2]]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def finish(training: Training, **what: Any) -> None:
    """End as a script should, and print what training has come to."""
    say(values=values(training.net), **what)
    dist.destroy_process_group()


def error_of(call: Callable[[], object]) -> list[str] | None:
    """Return the class and the text of the error of ours that a call raises, if it does."""
    try:
        call()
    except SynclineError as error:
        return [type(error).__name__, str(error)]
    return None


def die() -> None:
    """End at once, as if the machine had failed."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever() -> None:
    threading.Event().wait()


def undisturbed(place: Place, steps: int) -> None:
    training = begin(place, steps)
    finish(training)


def begin_until_rank_1_dies(place: Place) -> Training:
    """Make a step that rank 1 sends nothing of; it dies once the others wait for it."""
    training = begin(place)
    if place.rank == 1:
        training.hold(wait_for_ever)
    training.step()
    assert training.pending
    place.tell(f"rank {place.rank} has stepped")
    if place.rank == 1:
        for rank in range(place.ranks):
            place.await_(f"rank {rank} has stepped")
        die()
    return training


def dies_after_step(place: Place) -> None:
    begin_until_rank_1_dies(place).step(3)


def dies_after_step_and_the_error_is_caught(place: Place) -> None:
    """As above; whatever is read afterwards raises the same error."""
    training = begin_until_rank_1_dies(place)
    first = error_of(training.step)
    last = list(training.net.parameters())[-1]
    reads: list[Callable[[], object]] = [
        last.sum,
        last.tolist,
        lambda: torch.save(training.net.state_dict(), io.BytesIO()),
        lambda: copy.deepcopy(last),
        training.optimizer.state_dict,
        training.model.synchronize,
        lambda: training.model(training.inputs()),
        lambda: training.net(training.inputs()),
        training.optimizer.step,
    ]
    say(first=first, reads=[error_of(read) for read in reads])


def rank_1_dies(place: Place) -> None:
    """Let rank 1 die here, once rank 0 has come as far."""
    if place.rank == 1:
        place.await_("rank 0 is here")
        die()
    place.tell("rank 0 is here")


def dies_in_backward(place: Place, wait: Wait, step: int) -> None:
    """Rank 1 dies between two of its gradients."""
    training = begin(place, step, wait=wait)
    training.net[1].weight.register_hook(lambda _: rank_1_dies(place))
    training.step(2)


def dies_between_steps(place: Place, wait: Wait) -> None:
    """Rank 1 dies while nothing is on its way; the next step finds out."""
    training = begin(place, wait=wait)
    training.model.synchronize()
    dist.barrier()
    if place.rank == 1:
        die()
    training.step(2)


def dies_at_first(place: Place, step: int) -> None:
    """Rank 1 dies early: before the wrapper's buckets are final."""
    training = begin(place, step)
    if place.rank == 1:
        die()
    training.step(2)


def dies_before_construction(place: Place) -> None:
    """Rank 1 dies before it wraps its model."""
    join(place)
    rank_1_dies(place)  # while rank 0 connects, the error would be Gloo's
    Training(place)


def falls_silent(place: Place) -> None:
    training = begin(place)
    training.expect_answers(SHORT_TIMEOUT_S)
    if place.rank == 1:
        place.await_("given up")
        os._exit(0)
    error = error_of(lambda: training.step(2))
    say(error=error)
    place.tell("given up")
    os._exit(0)


def skips_a_step(place: Place, wait: Wait) -> None:
    training = begin(place, wait=wait)
    training.backward()
    if place.rank != 1:
        training.optimizer.step()
    training.step(3)


def skips_an_iteration(place: Place) -> None:
    training = begin(place)
    training.step(2 if place.rank == 1 else 3)
    if place.rank != 1:
        training.model.synchronize()


def ends(place: Place, how: str) -> None:
    """Rank 0 ends with its update pending; rank 1 reads its own only after that."""
    training = begin(place)
    if place.rank == 1:
        training.hold(lambda: place.await_("ending"))
    training.step()
    assert training.pending
    if place.rank == 1:
        place.await_("ending")
        say(values=values(training.net))
        os._exit(0)
    if "group destroyed" in how:
        dist.destroy_process_group()
    if "model dropped" in how:
        del training
        gc.collect()
    place.tell("ending")
    if how == "exception":
        raise ValueError("the user's own")
    if how == "exit code":
        sys.exit(3)


def gets_all_back(place: Place) -> None:
    """Wait until the backend has let go of what it was given, while the model stays."""
    lent: list[weakref.ref[torch.Tensor]] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        alias = keepalive(tensor)
        lent.append(weakref.ref(alias))
        return alias

    with mock.patch.object(dense_transport, "keepalive", noted):
        training = begin(place)
        training.model.synchronize()
    assert lent
    wait_until(lambda: all(each() is None for each in lent), "tensors of finished collectives")
    dist.barrier()
    dist.destroy_process_group()


def in_a_child(place: Place, job: str, how: str) -> None:
    run = globals()[job]
    process = multiprocessing.get_context("fork").Process(target=run, args=(place, how))
    process.start()
    process.join()
    assert process.exitcode is not None
    sys.exit(process.exitcode)


def ends_alone(place: Place, how: str) -> None:
    """Rank 0 ends with its update pending while rank 1 is dead or sends nothing."""
    shutdown.PATIENCE_AFTER_ERROR_S = 1.0
    shutdown.SILENCE_S = DEADLINE_S if how == "dead" else 1.0  # it may take a while to die
    training = begin(place)
    if how == "silent":
        training.expect_answers(SHORT_TIMEOUT_S)
    if place.rank == 1:
        training.hold(wait_for_ever)
    training.step()
    assert training.pending
    if place.rank == 0:
        (place.folder / "process").write_text(str(os.getpid()))
        place.tell("ending")
        if how == "silent, after an exception":
            raise ValueError("the user's own")
        return
    place.await_("ending")
    if how == "dead":
        die()
    else:
        process = Path("/proc", (place.folder / "process").read_text())
        wait_until(lambda: not process.exists(), "the end of rank 0")
        os._exit(0)


def says_at_exit(place: Place) -> None:
    """Exit handlers of the user still run where the exit code is ours."""
    atexit.register(lambda: say(handler="ran"))
    ends_alone(place, "dead")


class OnceError(Exception):
    """Something of the user's went wrong."""


def raise_once(module: nn.Module) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise OnceError

    handle = module.register_forward_pre_hook(fail)


def fails_in_forward(place: Place, steps: int) -> None:
    """Rank 1's forward pass fails now and then, and is tried again."""
    training = begin(place, 0, held_s=0.02)
    pending = 0
    for step in range(steps):
        if place.rank == 1 and step % 3 == 0:
            raise_once(training.net[step % LAYERS])
        try:
            training.step()
        except OnceError:
            pending += training.pending
            training.step()
    finish(training, pending=pending)


def fails_in_forward_for_good(place: Place) -> None:
    """Rank 1's script ends by an exception in its forward pass, with exchanges under way."""
    training = begin(place)
    if place.rank == 0:
        training.hold(lambda: place.await_("forward"))
    training.step()
    assert training.pending
    if place.rank == 1:
        raise_once(training.net[1])
        place.tell("forward")
    training.step(3)


def fails_in_backward(place: Place) -> None:
    """Rank 1's backward pass fails between two gradients, and it goes on as if nothing was."""
    training = begin(place)
    if place.rank == 1:

        def fail(_: torch.Tensor) -> None:
            raise OnceError

        handle = training.net[1].weight.register_hook(fail)
        try:
            training.backward()
        except OnceError:
            handle.remove()
        saved = error_of(training.optimizer.state_dict)  # of the last step, which is complete
        stepped = error_of(training.optimizer.step)
        say(saved=saved, stepped=stepped, went_on=error_of(training.step))
        return
    training.step(3)


class Fragile(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if Fragile.fails:
            group = self.param_groups[0]
            group["params"][0].data.add_(1)
            raise OnceError("no update")
        return super().step(closure)


def fails_in_an_update(place: Place) -> None:
    """The update of one layer fails in the forward pass; reads fail from then on."""
    training = begin(place, make=Fragile)
    with training.pending_step():
        Fragile.fails = True
    raised = ""
    try:
        training.model(training.inputs())
    except OnceError as error:
        raised = str(error)
    Fragile.fails = False
    first = training.net[0].weight
    reads = (lambda: first.sum(), training.model.synchronize, training.step)
    say(raised=raised, reads=[error_of(read) for read in reads])
    dist.barrier()


def is_interrupted(place: Place, steps: int) -> None:
    """Ctrl-C comes while rank 0 waits in a pre-forward hook; it goes on afterwards."""
    wait = Engine.wait

    def interrupted_wait(*args: Any) -> None:
        # Not at once, which would interrupt the call's beginning; whenever it comes, this waits.
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait(*args)

    training = begin(place)
    interrupted = 0
    while training.done < steps:
        if place.rank == 1:
            training.model.synchronize()
            place.await_(f"interrupted {training.done}")
            training.step()
            continue
        training.step()  # rank 1 has not begun, so these messages wait for it
        try:
            with mock.patch.object(Engine, "wait", interrupted_wait):
                training.model(training.inputs())
        except KeyboardInterrupt:
            interrupted += training.pending
        place.tell(f"interrupted {training.done - 1}")
    finish(training, interrupted=interrupted)


class Numbers(Dataset[torch.Tensor]):
    """A data set whose items are made in a forked process; one of them reads the model."""

    def __init__(self, read: nn.Parameter | None) -> None:
        self.read = read

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)) if self.read is None else self.read.detach().clone()


def forks(place: Place, reads: bool) -> None:
    """A worker of a data loader is forked while messages are on their way."""
    training = begin(place)
    got: list[Any] = []
    with training.pending_step():
        numbers = Numbers(training.net[-1].weight if reads else None)
        loader = DataLoader(numbers, num_workers=1, multiprocessing_context="fork")
        error = error_of(lambda: got.extend(item.flatten()[:2].tolist() for item in loader))
        assert training.pending
    training.step(2)
    finish(training, got=got, error=error)


def engine_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("syncline"))


def momenta(optimizer: torch.optim.Optimizer) -> list[float]:
    states = optimizer.state_dict()["state"].values()
    return [float(v) for s in states for v in s["momentum_buffer"].flatten()[:2]]


def gradients(net: nn.Module) -> list[float]:
    return [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]


def is_dropped(place: Place, keeps: str, when: str) -> None:
    """Drop the wrapper in mid-training, and keep the model or the optimizer, or neither."""
    training = begin(place)
    sends = threading.Event()
    training.hold(sends.wait)
    training.backward()
    if when == "after step":
        training.optimizer.step()
        assert training.pending
    assert engine_threads() == ["syncline completer", "syncline issuer"]
    watched = {
        "wrapper": weakref.ref(training.model),
        "engine": weakref.ref(planned_training(training.model).reducer.executor),
        "parameter": weakref.ref(next(training.net.parameters())),
    }
    net = training.net if "model" in keeps else None
    optimizer = training.optimizer if "optimizer" in keeps else None
    del training
    gc.collect()  # frees the wrapper,
    gc.collect()  # and now what only waited for it
    collected = [name for name, reference in watched.items() if reference() is None]
    assert collected == ["wrapper", "engine", *([] if keeps else ["parameter"])], collected
    sends.set()
    if optimizer is not None:
        say(state=momenta(optimizer))
    if net is not None:
        say(gradients=gradients(net), values=values(net))
        assert all(type(p) is nn.Parameter for p in net.parameters())
        assert not any(m._forward_pre_hooks for m in net.modules())
    wait_until(lambda: not engine_threads(), "the end of the engine's threads")
    dist.barrier()
    dist.destroy_process_group()


def synchronizes(place: Place) -> None:
    """Do what the job above keeps, with a wrapper that stays."""
    training = begin(place)
    training.backward()
    say(gradients=gradients(training.net), before=values(training.net))
    training.optimizer.step()
    finish(training, state=momenta(training.optimizer))


def repickled(given: Any) -> Any:
    return pickle.loads(pickle.dumps(given))


def is_copied(place: Place) -> None:
    """Copy and pickle wrapper, model and optimizer while updates are deferred, and train on."""
    training = begin(place)
    copies: list[nn.Module] = []
    for given, copied in (
        (training.model, copy.deepcopy),
        (training.model, repickled),
        (training.net, repickled),
    ):
        with training.pending_step():
            pass
        copies.append(copied(given))
        assert values(copies[-1]) == values(training.net)
    training.step()
    other = copy.deepcopy(training.net)
    before = values(other)
    with training.pending_step():
        pass
    other(training.inputs())
    assert training.pending
    assert values(other) == before
    for one in copies[:2]:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one.overlap(optimizer)
        one(training.inputs()).sum().backward()
        optimizer.step()
    training.step()
    finish(training)
