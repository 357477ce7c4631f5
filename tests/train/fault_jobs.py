"""What ranks that may die run: overlapped training in which something goes wrong."""

from __future__ import annotations

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
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from syncline.errors import SynclineError
from syncline.plan.plan import Message, Plan, Tensor, Wait
from syncline.train import shutdown
from syncline.train.ddp import DistributedDataParallel, planned_training
from syncline.train.engine.engine import Engine
from syncline.train.engine_executor import EngineExecutor
from syncline.train.measure import keepalive
from tests.mortal import POLL_S, Place
from tests.timeouts import DEADLINE_S, give_up

SHORT_TIMEOUT_S = 4.0
"""Where a rank falls silent, from that moment on."""
LAYERS = 4
WIDTH = 32
WARM = 11
"""Steps after which exchanges certainly run on under the next forward pass."""


class Net(nn.Sequential):
    """A few equal layers."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def need_first(workers: int, *, held_s: float = 0.0, wait: Wait = "need") -> Plan:
    """Return the plan with a message for each layer of ``Net``, the first layer's first.

    Args:
        workers: ranks.
        held_s: how long each message is held back once it is ready.
        wait: what waits for the messages.
    """
    sizes = {
        f"{layer}.{kind}": size
        for layer in reversed(range(LAYERS))
        for kind, size in (("bias", WIDTH), ("weight", WIDTH * WIDTH))
    }
    each = WIDTH + WIDTH * WIDTH
    return Plan(
        planner="by hand",
        model="Net",
        workers=workers,
        tensors=tuple(Tensor(name=name, elements=n) for name, n in sizes.items()),
        messages=tuple(
            Message(start=at * each, stop=(at + 1) * each, delay_s=held_s)
            for at in reversed(range(LAYERS))
        ),
        wait=wait,
        in_flight=2,
    )


def join(place: Place, timeout_s: float = DEADLINE_S) -> None:
    """Join the process group."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.folder}/store",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    torch.manual_seed(0)


class Training:
    """Overlapped training of ``Net``."""

    def __init__(
        self,
        place: Place,
        *,
        held_s: float = 0.0,
        wait: Wait = "need",
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        self.place = place
        plan = need_first(place.ranks, held_s=held_s, wait=wait)
        self.net = Net()
        self.model = DistributedDataParallel(self.net, plan=plan, check=False)
        self.optimizer = make(self.model.parameters(), lr=0.05, momentum=0.9)
        self.model.overlap(self.optimizer)
        self.done = 0

    def inputs(self) -> torch.Tensor:
        """Return this rank's batch of the present step."""
        generator = torch.Generator().manual_seed(1000 * self.done + self.place.rank)
        return torch.randn(5, WIDTH, generator=generator)

    def backward(self) -> None:
        """Run forward and backward."""
        self.optimizer.zero_grad()
        self.model(self.inputs()).square().mean().backward()

    def step(self, steps: int = 1) -> None:
        """Train."""
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.done += 1

    def warm(self) -> None:
        """Train until exchanges certainly run on under the next forward pass."""
        self.step(WARM)

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
        transport = self.engine._transport
        send = transport.send

        def held(*args: Any) -> Any:
            until()
            return send(*args)

        transport.send = held  # type: ignore[method-assign]

    def expect_answers(self, within_s: float) -> None:
        """Shorten the timeout of the exchange, once all ranks have come as far."""
        self.model.synchronize()
        dist.barrier()
        self.engine.timeout_s = within_s
        give_up(self.engine._transport.group, within_s)

    @property
    def engine(self) -> Engine:
        """The engine that exchanges the gradients."""
        stage = planned_training(self.model).reducer.executor
        assert isinstance(stage, EngineExecutor)
        return stage._engine

    @property
    def pending(self) -> bool:
        """Whether an update is deferred, told without reading it."""
        return any(type(p) is not nn.Parameter for p in self.net.parameters())


def values(net: nn.Module) -> list[float]:
    """Return a few values of every parameter."""
    return [float(v) for p in net.parameters() for v in p.detach().flatten()[:2]]


def say(**what: Any) -> None:
    """Print a line that the test reads."""
    print(json.dumps(what), flush=True)


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
    """Return when the process ends."""
    threading.Event().wait()


# ------------------------------------------------------------------ what it should come to


def undisturbed(place: Place, steps: int) -> None:
    """Train and say what came of it."""
    join(place)
    training = Training(place)
    training.step(steps)
    say(values=values(training.net))
    dist.destroy_process_group()


# ------------------------------------------------------------------ a rank dies


def step_before_rank_1_dies(training: Training) -> None:
    """Make a step that rank 1 sends nothing of; it dies once the others wait for it."""
    place = training.place
    training.warm()
    if place.rank == 1:
        training.hold(wait_for_ever)
    training.step()
    assert training.pending
    place.tell(f"rank {place.rank} has stepped")
    if place.rank == 1:
        for rank in range(place.ranks):
            place.await_(f"rank {rank} has stepped")
        die()


def dies_after_step(place: Place) -> None:
    """Rank 1 dies without having sent its messages; the others go on."""
    join(place)
    training = Training(place)
    step_before_rank_1_dies(training)
    training.step(3)


def dies_after_step_and_the_error_is_caught(place: Place) -> None:
    """As above; whatever is read afterwards raises the same error."""
    join(place)
    training = Training(place)
    step_before_rank_1_dies(training)
    first = error_of(training.step)
    last = list(training.net.parameters())[-1]
    reads: list[Callable[[], object]] = [
        lambda: last.sum(),
        lambda: last.tolist(),
        lambda: torch.save(training.net.state_dict(), io.BytesIO()),
        lambda: copy.deepcopy(last),
        lambda: training.optimizer.state_dict(),
        lambda: training.model.synchronize(),
        lambda: training.model(training.inputs()),
        lambda: training.net(training.inputs()),
        lambda: training.optimizer.step(),
    ]
    say(first=first, reads=[error_of(read) for read in reads])


def dies_in_backward(place: Place, wait: Wait, step: int) -> None:
    """Rank 1 dies between two of its gradients, once rank 0 has come as far."""
    join(place)
    training = Training(place, wait=wait)
    training.step(step)

    def reached(_: torch.Tensor) -> None:
        if place.rank == 1:
            place.await_("backward")
            die()
        place.tell("backward")

    training.net[1].weight.register_hook(reached)
    training.step(2)


def dies_between_steps(place: Place, wait: Wait) -> None:
    """Rank 1 dies while nothing is on its way; the next step finds out."""
    join(place)
    training = Training(place, wait=wait)
    training.warm()
    training.model.synchronize()
    dist.barrier()
    if place.rank == 1:
        die()
    training.step(2)


def dies_at_first(place: Place, step: int) -> None:
    """Rank 1 dies early: before the wrapper's buckets are final."""
    join(place)
    training = Training(place)
    training.step(step)
    if place.rank == 1:
        die()
    training.step(2)


def dies_before_construction(place: Place) -> None:
    """Rank 1 dies before it wraps its model, once both ranks are in the group."""
    join(place)
    if place.rank == 1:
        place.await_("joined")  # while rank 0 connects, the error would be Gloo's
        die()
    place.tell("joined")
    Training(place)


def falls_silent(place: Place) -> None:
    """Rank 1 stops answering, and is still there."""
    join(place)
    training = Training(place)
    training.warm()
    training.expect_answers(SHORT_TIMEOUT_S)
    if place.rank == 1:
        place.await_("given up")
        os._exit(0)
    error = error_of(lambda: training.step(2))
    say(error=error)
    place.tell("given up")
    os._exit(0)


# ------------------------------------------------------------------ ranks part


def skips_a_step(place: Place, wait: Wait) -> None:
    """Rank 1 makes one update fewer."""
    join(place)
    training = Training(place, wait=wait)
    training.warm()
    training.backward()
    if place.rank != 1:
        training.optimizer.step()
    training.step(3)


def skips_an_iteration(place: Place) -> None:
    """Rank 1 ends one iteration before the others."""
    join(place)
    training = Training(place)
    training.warm()
    training.step(2 if place.rank == 1 else 3)
    if place.rank != 1:
        training.model.synchronize()


# ------------------------------------------------------------------ a process ends with work left


def ends(place: Place, how: str) -> None:
    """Rank 0 ends with its update pending; rank 1 reads its own only after that."""
    join(place)
    training = Training(place)
    training.warm()
    if place.rank == 1:
        training.hold(lambda: place.await_("ending"))
    training.step()
    assert training.pending
    if place.rank == 1:
        place.await_("ending")
        say(values=values(training.net))
        os._exit(0)
    if how == "group destroyed":
        dist.destroy_process_group()
    elif how == "group destroyed, model dropped":
        dist.destroy_process_group()
        del training
        gc.collect()
    elif how == "model dropped":
        del training
        gc.collect()
    place.tell("ending")
    if how == "exception":
        raise ValueError("the user's own")
    if how == "exit code":
        sys.exit(3)


def gets_all_back(place: Place) -> None:
    """Wait until the backend has let go of what it was given, while the model stays."""
    join(place)
    training = Training(place)
    training.warm()
    training.model.synchronize()
    deadline = time.monotonic() + DEADLINE_S / 2
    while any(each() is not None for each in keepalive._aliases):
        assert time.monotonic() < deadline, "something keeps a tensor of a finished collective"
        time.sleep(POLL_S)
    dist.barrier()
    dist.destroy_process_group()


def ends_in_a_child(place: Place) -> None:
    """As above, in a process that multiprocessing has started."""
    process = multiprocessing.get_context("fork").Process(target=ends, args=(place, ""))
    process.start()
    process.join()
    assert process.exitcode is not None
    sys.exit(process.exitcode)


def ends_alone(place: Place, how: str) -> None:
    """Rank 0 ends with its update pending while rank 1 is dead or sends nothing."""
    shutdown.PATIENCE_AFTER_ERROR_S = 1.0
    shutdown.SILENCE_S = DEADLINE_S if how == "dead" else 1.0  # it may take a while to die
    join(place)
    training = Training(place)
    training.warm()
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
        while process.exists():
            time.sleep(0.02)
        os._exit(0)


def ends_alone_in_a_child(place: Place) -> None:
    """As above, in a process that multiprocessing has started."""
    process = multiprocessing.get_context("fork").Process(target=ends_alone, args=(place, "dead"))
    process.start()
    process.join()
    assert process.exitcode is not None
    sys.exit(max(process.exitcode, 0))


def says_at_exit(place: Place) -> None:
    """Exit handlers of the user still run where the exit code is ours."""
    import atexit

    atexit.register(lambda: say(handler="ran"))
    ends_alone(place, "dead")


# ------------------------------------------------------------------ exceptions of the user


class OnceError(Exception):
    """Something of the user's went wrong."""


def raise_once(module: nn.Module) -> None:
    """Let the next forward pass of a module fail."""

    def fail(*_: Any) -> None:
        handle.remove()
        raise OnceError

    handle = module.register_forward_pre_hook(fail)


def fails_in_forward(place: Place, steps: int) -> None:
    """Rank 1's forward pass fails now and then, and is tried again."""
    join(place)
    training = Training(place, held_s=0.02)
    pending = 0
    for step in range(steps):
        if place.rank == 1 and step % 3 == 0:
            raise_once(training.net[step % LAYERS])
        try:
            training.step()
        except OnceError:
            pending += training.pending
            training.step()
    say(values=values(training.net), pending=pending)
    dist.destroy_process_group()


def fails_in_forward_for_good(place: Place) -> None:
    """Rank 1's script ends by an exception in its forward pass, with exchanges under way."""
    join(place)
    training = Training(place)
    training.warm()
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
    join(place)
    training = Training(place)
    training.warm()
    if place.rank == 1:

        def fail(_: torch.Tensor) -> None:
            raise OnceError

        handle = training.net[1].weight.register_hook(fail)
        try:
            training.backward()
        except OnceError:
            handle.remove()
        stepped = error_of(training.optimizer.step)
        say(stepped=stepped, went_on=error_of(training.step))
        return
    training.step(3)


class Fragile(torch.optim.SGD):
    """An optimizer that fails in one of its updates."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """Update, or fail after some parameters."""
        if Fragile.fails:
            group = self.param_groups[0]
            group["params"][0].data.add_(1)
            raise OnceError("no update")
        return super().step(closure)


def fails_in_an_update(place: Place) -> None:
    """The update of one layer fails in the forward pass; reads fail from then on."""
    join(place)
    training = Training(place, make=Fragile)
    training.warm()
    with training.pending_step():
        Fragile.fails = True
    raised = ""
    try:
        training.model(training.inputs())
    except OnceError as error:
        raised = str(error)
    Fragile.fails = False
    first = training.net[0].weight
    say(
        raised=raised,
        reads=[
            error_of(lambda: first.sum()),
            error_of(training.model.synchronize),
            error_of(training.step),
        ],
    )
    dist.barrier()


@contextlib.contextmanager
def interrupted_in(waiter: Any, name: str) -> Iterator[None]:
    """Send Ctrl-C to this process when it calls a function that will wait."""
    wait = getattr(waiter, name)

    def interrupted(*args: Any) -> Any:
        # Not at once, which would interrupt the call's beginning; whenever it comes, this waits.
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return wait(*args)

    setattr(waiter, name, interrupted)
    try:
        yield
    finally:
        setattr(waiter, name, wait)


def is_interrupted(place: Place, steps: int) -> None:
    """Ctrl-C comes while rank 0 waits in a pre-forward hook; it goes on afterwards."""
    join(place)
    training = Training(place)
    training.warm()
    interrupted = 0
    while training.done < steps:
        if place.rank == 1:
            training.model.synchronize()
            place.await_(f"interrupted {training.done}")
            training.step()
            continue
        training.step()  # rank 1 has not begun, so these messages wait for it
        try:
            with interrupted_in(training.engine, "wait"):
                training.model(training.inputs())
        except KeyboardInterrupt:
            interrupted += training.pending
        place.tell(f"interrupted {training.done - 1}")
    say(values=values(training.net), interrupted=interrupted)
    dist.destroy_process_group()


# ------------------------------------------------------------------ forks


class Numbers(Dataset[torch.Tensor]):
    """A data set whose items are made in a forked process; one of them reads the model."""

    def __init__(self, net: nn.Module, *, reads: bool) -> None:
        self._net = net
        self._reads = reads

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._reads:
            return self._net[-1].weight.detach().clone()  # type: ignore[index]
        return torch.full((2,), float(index))


def forks(place: Place, reads: bool) -> None:
    """A worker of a data loader is forked while messages are on their way."""
    join(place)
    training = Training(place)
    training.warm()
    got: list[Any] = []
    error = None
    with training.pending_step():
        loader = DataLoader(
            Numbers(training.net, reads=reads), num_workers=1, multiprocessing_context="fork"
        )
        try:
            for item in loader:
                got += [item.flatten()[:2].tolist()]
        except SynclineError as caught:
            error = [type(caught).__name__, str(caught)]
        still = training.pending
    training.step(2)
    say(got=got, error=error, still=still, values=values(training.net))
    dist.destroy_process_group()


# ------------------------------------------------------------------ dropping and copying


def engine_threads() -> list[str]:
    """Return the names of the threads of engines that are alive."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("syncline"))


def gone(seconds: float = DEADLINE_S) -> list[str]:
    """Return the threads of engines that do not end in time."""
    deadline = time.monotonic() + seconds
    while engine_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine_threads()


def is_dropped(place: Place, keeps: str, when: str) -> None:
    """Drop the wrapper in mid-training, and keep the model or the optimizer, or neither."""
    join(place)
    training = Training(place)
    training.warm()
    sends = threading.Event()
    training.hold(sends.wait)
    training.backward()
    if when == "after step":
        training.optimizer.step()
        assert training.pending
    running = engine_threads()
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
    sends.set()
    told: dict[str, Any] = {}
    if optimizer is not None:
        states = optimizer.state_dict()["state"].values()
        told["state"] = [float(v) for s in states for v in s["momentum_buffer"].flatten()[:2]]
    if net is not None:
        told["gradients"] = [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]
        told["values"] = values(net)
        told["classes"] = sorted({type(p).__name__ for p in net.parameters()})
        told["hooks"] = sum(len(m._forward_pre_hooks) for m in net.modules())
    say(running=running, collected=collected, left=gone(), **told)
    dist.barrier()
    dist.destroy_process_group()


def synchronizes(place: Place) -> None:
    """Do what the job above keeps, with a wrapper that stays."""
    join(place)
    training = Training(place)
    training.warm()
    training.backward()
    gradients = [float(p.grad.sum()) for p in training.net.parameters() if p.grad is not None]
    before = values(training.net)
    training.optimizer.step()
    states = training.optimizer.state_dict()["state"].values()
    state = [float(v) for s in states for v in s["momentum_buffer"].flatten()[:2]]
    say(gradients=gradients, before=before, state=state, values=values(training.net))
    dist.destroy_process_group()


def is_copied(place: Place) -> None:
    """Copy and pickle wrapper, model and optimizer while updates are deferred, and train on."""
    join(place)
    training = Training(place)
    training.warm()
    with training.pending_step():
        pass
    twin = copy.deepcopy(training.model)
    same = values(twin) == values(training.net)
    with training.pending_step():
        pass
    loaded = pickle.loads(pickle.dumps(training.model))
    same = same and values(loaded) == values(training.net)
    with training.pending_step():
        pass
    net = pickle.loads(pickle.dumps(training.net))
    same = same and values(net) == values(training.net)
    training.step()
    other = copy.deepcopy(training.net)
    before = values(other)
    with training.pending_step():
        pass
    other(training.inputs())
    untouched = values(other) == before and training.pending
    for one in (twin, loaded):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one.overlap(optimizer)
        one(training.inputs()).sum().backward()
        optimizer.step()
    training.step()
    say(same=same, untouched=untouched, values=values(training.net))
    dist.destroy_process_group()
