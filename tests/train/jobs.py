"""What the workers of the tests in this folder run."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from syncline.errors import MismatchError, UserError
from syncline.plan.network import Network
from syncline.plan.plan import Message, Plan, Tensor
from syncline.plan.profile import ACCUMULATING
from syncline.plan.quantities import NS_PER_S
from syncline.plan.run import Run
from syncline.torch_private import bucket_sizes, logging_data
from syncline.train import reducer_executor
from syncline.train.ddp import DistributedDataParallel, planned_training
from syncline.train.experiments import Steps
from syncline.train.log import logger
from syncline.train.measure.clock import CpuClock
from syncline.train.policy import Policy
from syncline.train.rank_measurements import RankMeasurements, StageResult
from syncline.train.stages import Measurement, Stage
from syncline.train.tuning import Tuning
from syncline.train.watches import LossWatch
from tests.clock import added_time
from tests.train.models import MODELS, Plain
from tests.train.overlap.overlap_plans import Style, plan_of

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
PLAIN_SIZES = {
    "narrow.bias": 10,
    "narrow.weight": 960,
    "wide.bias": 96,
    "wide.weight": 96 * 512,
    "norm.weight": 8,
    "norm.bias": 8,
    "conv.weight": 72,
    "conv.bias": 8,
}
"""Elements of the gradients of ``Plain``, in the order in which they become ready."""
SLOW = Network.line(workers=2, a_s=1e-4, b_s_per_byte=1e-7, name="slow")


def plain_plan(workers: int = 2) -> Plan:
    """Return a plan of three messages for the model ``Plain``, made without measuring it."""
    cuts = (0, 970, 970 + 96 + 96 * 512, sum(PLAIN_SIZES.values()))
    return Plan(
        planner="by hand",
        model="Plain",
        workers=workers,
        tensors=tuple(Tensor(name=name, elements=n) for name, n in PLAIN_SIZES.items()),
        messages=tuple(Message(start=a, stop=b) for a, b in itertools.pairwise(cuts)),
    )


def batch(step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return another batch for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return (
        torch.randn(6, 1, 8, 8, generator=generator),
        torch.randint(10, (6,), generator=generator),
    )


def train(
    ddp: TorchDDP,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    first: int = 0,
    accumulate: int = 1,
    bf16: bool = False,
) -> list[str]:
    """Train and return the phases that were passed through."""
    phases = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            inputs, targets = batch(step, micro)
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                    output = ddp(inputs)
                cross_entropy(output.float(), targets).backward()
        optimizer.step()
        phases.append(getattr(ddp, "phase", "stock"))
    return phases


def steps_to_steady(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    """Train until measuring is over and return how many steps that took."""
    steps = 0
    while ddp.measuring:
        train(ddp, optimizer, 1, first=steps)
        steps += 1
        assert steps < 500, f"still in {ddp.phase!r}"
    return steps


def compare_with_stock(model: str, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train twins under both classes through every stage; say whether all bits agree."""
    arguments = options.get("ddp", {})
    accumulate, bf16 = options.get("accumulate", 1), options.get("bf16", False)
    module = MODELS[model]()
    twin = copy.deepcopy(module)
    ours = DistributedDataParallel(module, planner=options.get("planner", "auto"), **arguments)
    stock = TorchDDP(twin, **arguments)
    our_optimizer = OPTIMIZERS[optimizer](ours.parameters())
    stock_optimizer = OPTIMIZERS[optimizer](stock.parameters())
    phases: list[str] = []
    settled: list[str] = []
    step = 0
    noted = mock.patch.object(
        CpuClock, "synchronize", side_effect=lambda: settled.append(ours.phase)
    )
    with noted, measured_as(planned_is_faster):
        while ours.measuring or step % 20:
            phases += train(ours, our_optimizer, 1, first=step, accumulate=accumulate, bf16=bf16)
            train(stock, stock_optimizer, 1, first=step, accumulate=accumulate, bf16=bf16)
            step += 1
            assert step < 500, phases
    phases += train(ours, our_optimizer, 20, first=step, accumulate=accumulate, bf16=bf16)
    train(stock, stock_optimizer, 20, first=step, accumulate=accumulate, bf16=bf16)
    mine, theirs = ours.state_dict(), stock.state_dict()
    assert list(mine) == list(theirs)
    differences = [key for key in mine if not torch.equal(mine[key], theirs[key])]
    ours_state = our_optimizer.state_dict()["state"]
    stock_state = stock_optimizer.state_dict()["state"]
    assert ours_state.keys() == stock_state.keys()
    for index, values in ours_state.items():
        for name, value in values.items():
            other = stock_state[index][name]
            same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            if not same:
                differences.append(f"optimizer {index} {name}")
    run = ours.run_record()
    assert ours.profile is not None
    operations = [operation.name for operation in ours.profile.operations]
    return {
        "differences": differences,
        "phases": list(dict.fromkeys(phases)),
        "settled": settled,
        "steps": step + 20,
        "needed_by": [gradient.needed_by for gradient in ours.profile.gradients],
        "accumulating": [n for n, name in enumerate(operations) if name == ACCUMULATING],
        "decision": run.decision,
        "messages": run.messages,
        "reason": run.reason,
    }


def buckets_are_messages(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a plan of many messages and return it with the reducer's buckets."""
    module = MODELS[model]()
    ddp = DistributedDataParallel(module, planner="wfbp", check=False, **arguments)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    steps_to_steady(ddp, optimizer)
    train(ddp, optimizer, 3)
    plan = ddp.plan
    assert plan is not None, ddp.run_record().reason
    return {
        "planned": list(plan.message_bytes()),
        "reducer": bucket_sizes(logging_data(ddp)),
        "profile": ddp.profile.to_json() if ddp.profile else None,
        "network": ddp.network.to_json() if ddp.network else None,
    }


def reverts_when_slower() -> dict[str, Any]:
    """Make every planned iteration slow by a fault in the forward pass; see it revert."""

    class Slowed(Plain):
        wrapper: DistributedDataParallel | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            trial = self.wrapper is not None and self.wrapper.plan is not None
            add(20.0 if trial else 10.0)
            return super().forward(x)

    with added_time() as add:
        module = Slowed()
        ddp = DistributedDataParallel(module, planner="wfbp")
        module.__dict__["wrapper"] = ddp
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        phases = set()
        for step in range(500):
            phases |= set(train(ddp, optimizer, 1, first=step))
            if not ddp.measuring:
                break
    run = ddp.run_record()
    return {
        "rechecked": "comparing with DDP" in phases,
        "decision": run.decision,
        "reason": run.reason,
        "planner": run.planner,
        "plan": ddp.plan is None,
        "said": [event.text for event in run.events],
    }


def with_given_plan(plan_json: str, check: bool) -> dict[str, Any]:
    """Train under a plan made elsewhere."""
    ddp = DistributedDataParallel(Plain(), plan=Plan.from_json(plan_json), check=check)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    phases = train(ddp, optimizer, 360)
    while ddp.measuring:  # where iterations become slower, DDP is measured again
        phases += train(ddp, optimizer, 1, first=len(phases))
    run = ddp.run_record()
    spans = [(span.name, span.start, span.iterations) for span in run.phases]
    return {
        "phases": list(dict.fromkeys(phases)),
        "steps": len(phases),
        "decision": run.decision,
        "spans": spans,
    }


def compare_given_plan(plan_json: str) -> dict[str, Any]:
    """Train twins under a plan and under torch's class; say whether all bits agree."""
    module = Plain()
    twin = copy.deepcopy(module)
    ours = DistributedDataParallel(module, plan=Plan.from_json(plan_json), check=False)
    stock = TorchDDP(twin)
    optimizers = [OPTIMIZERS["sgd"](ddp.parameters()) for ddp in (ours, stock)]
    ours.overlap(optimizers[0])
    for ddp, optimizer in zip((ours, stock), optimizers, strict=True):
        train(ddp, optimizer, 20)
    run = ours.run_record()
    return {
        "differences": differing(ours, stock),
        "decision": run.decision,
        "messages": run.messages,
    }


def flushes(kind: str) -> dict[str, Any]:
    """Read gradients or parameters at every step, so that nothing is left to overlap.

    Every message is held back, so that it is under way when the update is asked for. What was
    measured is not what decides: the plan wins.
    """
    held_back = tuple(replace(m, delay_s=5e-3) for m in plain_plan().messages)
    plan = replace(plain_plan(), messages=held_back, wait="need")
    module = Plain()
    twin = copy.deepcopy(module)
    ours, stock = DistributedDataParallel(module, plan=plan), TorchDDP(twin)
    optimizers = [OPTIMIZERS["sgd"](ddp.parameters()) for ddp in (ours, stock)]
    ours.overlap(optimizers[0])
    waits: list[str] = []
    phases: list[str] = []
    step = 0
    with measured_as(planned_is_faster):
        while ours.measuring or step < 160:
            phases.append(ours.phase)
            late = "later" not in kind or (not ours.measuring and step > 60)
            for ddp, optimizer in zip((ours, stock), optimizers, strict=True):
                one_step(ddp, optimizer, step, kind if late else "")
            if ours.plan is not None:
                waits.append(ours.plan.wait)
            step += 1
            assert step < 500, ours.phase
    run = ours.run_record()
    return {
        "differences": differing(ours, stock),
        "waits": [wait for wait, _ in itertools.groupby(waits)],
        "decision": run.decision,
        "deferred": run.deferred,
        "said": [event.text for event in run.events if "gains nothing" in event.text],
        "tried": sum(phase.startswith("trying") for phase in phases[: first_said(run)]),
    }


def first_said(run: Run) -> int:
    """Return the iteration at which it was first said that deferring gains nothing."""
    return next((e.iteration for e in run.events if "gains nothing" in e.text), 0)


def planned_is_faster(stage: Stage) -> float:
    """Return a tenth of a second for DDP, and half of it for any plan."""
    return 0.1 if stage.plan is None else 0.05


@contextlib.contextmanager
def measured_as(seconds: Callable[[Stage], float]) -> Iterator[None]:
    """Let iterations take what a function of their stage says, as far as policies are told."""
    measure = RankMeasurements.measurement

    def told(
        measurements: RankMeasurements, stage: Stage, result: StageResult, *known: Any
    ) -> Measurement:
        found = measure(measurements, stage, result, *known)
        return replace(
            found,
            times_s=(seconds(stage),) * len(found.times_s),
            passes_s=(1.0,) * len(found.passes_s),
        )

    with mock.patch.object(RankMeasurements, "measurement", told):
        yield


def fails_to_plan() -> list[str]:
    """Return the error with which a training ends whose policy has a bug."""

    def broken(policy: Policy) -> Steps:
        yield next(steps(policy))
        raise ZeroDivisionError("a bug")

    steps = Policy.steps
    model = Plain()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with mock.patch.object(Policy, "steps", broken):
        try:
            steps_to_steady(ddp, optimizer)
        except Exception as error:
            return [type(error).__name__, str(error)]
    return []


def turns_slow() -> dict[str, Any]:
    """Let a plan that was kept be slower in the long run, as far as the script is told."""
    ddp = DistributedDataParallel(Plain(), plan=replace(plain_plan(), wait="need"))
    optimizer = ddp.overlap(OPTIMIZERS["sgd"](ddp.parameters()))
    slow = False

    def takes(stage: Stage) -> float:
        return 0.1 if stage.plan is None else 0.2 if slow else 0.05

    def is_slow(*_: object) -> bool:
        return slow

    phases: list[str] = []
    with (
        measured_as(takes),
        mock.patch.object(LossWatch, "close_window", is_slow),
    ):
        before = steps_to_steady(ddp, optimizer)
        slow = True
        phases += train(ddp, optimizer, 150, first=before)
    run = ddp.run_record()
    return {
        "phases": [phase for phase, _ in itertools.groupby(phases)],
        "decision": run.decision,
        "deferred": run.deferred,
        "said": [event.text for event in run.events],
    }


def one_step(ddp: TorchDDP, optimizer: torch.optim.Optimizer, step: int, reads: str) -> None:
    """Take one step, and read on the way what ``reads`` says."""
    optimizer.zero_grad()
    inputs, targets = batch(step)
    cross_entropy(ddp(inputs), targets).backward()
    if "clip" in reads:
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
    if "one rank" in reads and dist.get_rank() == 1:
        assert all(torch.isfinite(p.grad).all() for p in ddp.parameters() if p.grad is not None)
    optimizer.step()
    if "average" in reads:
        assert all(p.detach().clone().isfinite().all() for p in ddp.parameters())


def differing(ours: nn.Module, stock: nn.Module) -> list[str]:
    """Return the names of the values in which two models differ."""
    mine, theirs = ours.state_dict(), stock.state_dict()
    assert list(mine) == list(theirs)
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


def refuses(plan_json: str) -> str:
    """Return the message with which a plan for something else is refused."""
    from syncline.errors import MismatchError

    try:
        DistributedDataParallel(Plain(), plan=Plan.from_json(plan_json))
    except MismatchError as error:
        return str(error)
    return ""


def refuses_network(workers: int) -> str:
    """Return the message with which a network of another size is refused."""
    from syncline.errors import MismatchError

    network = Network.line(workers=workers, a_s=1e-4, b_s_per_byte=1e-9, name="elsewhere")
    try:
        DistributedDataParallel(Plain(), network=network)
    except MismatchError as error:
        return str(error)
    return ""


def refuses_hook_and_arguments() -> list[str]:
    """Return the messages for what the wrapper does not take."""
    from syncline.errors import UserError

    ddp = DistributedDataParallel(Plain())
    plan = plain_plan()
    calls = [
        lambda: ddp.register_comm_hook(None, lambda *_: None),
        lambda: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        lambda: ddp._update_process_group(dist.group.WORLD),
        lambda: DistributedDataParallel(Plain(), planner="mergge"),
        lambda: DistributedDataParallel(Plain(), bucket_cap_mb_list=[1, 2]),
        lambda: DistributedDataParallel(Plain(), plan=plan, network=SLOW),
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except UserError as error:
            messages.append(str(error))
    return messages


def wraps_under_a_tracer() -> dict[str, Any]:
    """Wrap while a tracer's function stands in for the constructor of torch's class."""
    original, given = TorchDDP.__init__, []

    def traced(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        given.append((args[1:], kwargs))
        original(self, *args, **kwargs)

    with mock.patch.object(TorchDDP, "__init__", traced):
        ddp = DistributedDataParallel(
            Plain(), None, None, 0, None, True, None, 1, static_graph=True
        )
        unused = dist.get_rank() == 1
        try:
            DistributedDataParallel(Plain(), *[None] * 4, True, None, None, unused)
            refused = ""
        except MismatchError as error:
            refused = str(error)
    one_step(ddp, OPTIMIZERS["sgd"](ddp.parameters()), 0, "nothing")
    return {
        "given": given,
        "taken": (ddp.bucket_bytes_cap, ddp.static_graph),
        "refused": refused,
    }


def reads_in_the_midst_of_changes() -> dict[str, Any]:
    """Read how training goes where another thread could: while the reducer or the view changes."""
    ddp = DistributedDataParallel(Plain(), planner="merge", check=False)
    optimizer = ddp.overlap(OPTIMIZERS["sgd"](ddp.parameters()))
    changes: list[str] = []
    differing: list[str] = []
    before = first = (ddp.metrics(), ddp.run_record(), ddp.exposed_communication_s)

    def look(where: str) -> None:
        changes.append(where)
        read = (ddp.metrics(), ddp.run_record(), ddp.exposed_communication_s)
        differing.extend(f"{where}: {b}" for a, b in zip(before, read, strict=True) if a != b)

    make, say = TorchDDP._ddp_init_helper, Tuning._report

    def made(*args: Any) -> None:
        look("no reducer")
        make(*args)

    def said(*args: Any) -> None:
        say(*args)
        look("decided")

    with (
        mock.patch.object(TorchDDP, "_ddp_init_helper", made),
        mock.patch.object(Tuning, "_report", said),
    ):
        while ddp.measuring:
            train(ddp, optimizer, 1)
            before = (ddp.metrics(), ddp.run_record(), ddp.exposed_communication_s)
    train(ddp, optimizer, 10)
    return {
        "changes": sorted(set(changes)),
        "differing": differing,
        "first": first[0],
        "last": ddp.metrics(),
    }


def reads_a_broken_property() -> list[str]:
    """Return what is said where the reading of a property fails inside."""
    ddp = DistributedDataParallel(Plain())
    del planned_training(ddp).runner.iterations.stage
    said = []
    for name in ("phase", "plan", "measuring"):
        try:
            getattr(ddp, name)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def joins_uneven_inputs() -> dict[str, Any]:
    """Train with another number of batches on every rank under ``join``, in mid-measurement."""
    module = Plain()
    twin = copy.deepcopy(module)
    ours, stock = DistributedDataParallel(module), TorchDDP(twin)
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (ours, stock)]
    for ddp, optimizer in zip((ours, stock), optimizers, strict=True):
        train(ddp, optimizer, 5)
        with ddp.join():
            train(ddp, optimizer, 4 + 3 * dist.get_rank(), first=100)
    mine, theirs = ours.state_dict(), stock.state_dict()
    after_join = [key for key in mine if not torch.equal(mine[key], theirs[key])]
    before = ours.phase
    steps_to_steady(ours, optimizers[0])
    return {"before": before, "after": ours.phase, "differences": after_join}


def keeps_what_the_user_attached() -> dict[str, Any]:
    """Attach hooks and settings to the wrapper and see them survive every rebuild."""
    ddp = DistributedDataParallel(Plain(), check=False, planner="wfbp")
    calls = {"pre": 0, "post": 0}

    def pre(*_: Any) -> None:
        calls["pre"] += 1

    def post(*_: Any) -> None:
        calls["post"] += 1

    ddp.register_forward_pre_hook(pre)
    ddp.register_forward_hook(post)
    ddp.my_note = "kept"
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    steps = steps_to_steady(ddp, optimizer)
    ddp.eval()
    with torch.no_grad():
        ddp(batch(0)[0])
    in_eval = ddp.training
    ddp.train()
    return {
        "steps": steps,
        "calls": calls,
        "note": ddp.my_note,
        "is_torch_ddp": isinstance(ddp, TorchDDP),
        "training_in_eval": in_eval,
        "module_is_plain": isinstance(ddp.module, Plain),
    }


AWAY_S = 1000.0


def leaves_training_after_every_step() -> dict[str, Any]:
    """Spend ``AWAY_S`` of a clock of our own in evaluation mode after every step."""
    with added_time() as add:
        ddp = DistributedDataParallel(Plain())
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        steps = steady = 0
        while steady < 10:
            train(ddp, optimizer, 1, first=steps)
            steady += not ddp.measuring
            ddp.eval()
            add(AWAY_S / 2)
            with torch.no_grad():
                ddp(batch(0)[0])
            ddp.eval()
            add(AWAY_S / 2)
            ddp.train()
            steps += 1
        profile, run = ddp.profile, ddp.run_record()
        assert profile is not None
        assert run.baseline is not None
        return {
            "profile": sum(each.duration_ns for each in profile.operations) / NS_PER_S,
            "baseline": run.baseline.iteration_s,
            "steady": max(planned_training(ddp).runner.steady_iteration_s),
            "measuring": sum(phase.seconds for phase in run.phases if phase.name != "steady"),
        }


class ComplexHalves(nn.Module):
    """A parameter of a type that plans do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2).to(torch.complex32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(torch.complex64)


class NoElements(nn.Module):
    """A model whose parameters have no elements, such as adapters of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.nothing = (nn.Parameter(torch.empty(*n, 0)) for n in ((), (3,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum() + self.nothing.sum()


def tells_of_a_compiled_model(how: str) -> list[str]:
    """Return the warnings of a training whose whole model is compiled.

    Its optimizer is overlapped when it first steps, after the first forward pass.
    """
    torch._dynamo.reset()
    said: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    compiled = functools.partial(torch.compile, backend="eager")
    if how == "before":
        net = compiled(net)
    elif how == "forward":
        net.forward = compiled(net.forward)
    logger.addHandler(keep)
    try:
        ddp = DistributedDataParallel(net, planner="merge", overlap_optimizers=True)
        run = compiled(ddp) if how == "after" else ddp
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler
            for _ in range(4):
                optimizer.zero_grad()
                run(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
    finally:
        logger.removeHandler(keep)
    assert not ddp.defers
    return said


def trains_unplannable(kind: str) -> dict[str, Any]:
    """Train what cannot be planned, with DDP's buckets."""
    module: nn.Module
    options: dict[str, Any] = {}
    if kind == "sparse":
        module = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
        inputs = torch.randint(10, (5, 3))
    elif kind == "complex halves":
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        module = ComplexHalves()
        inputs = torch.randn(5, 4, dtype=torch.complex64)
    elif kind.startswith("no elements"):
        module = NoElements()
        inputs = torch.randn(5, 4)
        if kind.endswith("given"):
            tensors = tuple(Tensor(name=name, elements=0) for name in ("none", "nothing"))
            plan = Plan(planner="by hand", model="", workers=2, tensors=tensors, messages=())
            options = {"plan": replace(plan, wait="need"), "check": False}
    else:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).to(torch.float64))
        module[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        inputs = torch.randn(5, 4)
    ddp = DistributedDataParallel(module, **options)
    for _ in range(3):
        ddp(inputs).abs().sum().backward()
    run = ddp.run_record()
    return {"phase": ddp.phase, "decision": run.decision, "reason": run.reason}


def copies_and_pickles() -> dict[str, Any]:
    """Copy a wrapper in mid-measurement; both train on."""
    ddp = DistributedDataParallel(Plain())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    train(ddp, optimizer, 5)
    twin = copy.deepcopy(ddp)
    train(twin, OPTIMIZERS["sgd"](twin.parameters()), 3)
    steps_to_steady(ddp, optimizer)
    return {"twin": twin.phase, "ours": ddp.phase, "run": twin.run_record().decision}


def writes_a_report(folder: str) -> dict[str, Any]:
    """Run to the steady state and write the report on rank 0."""
    ddp = DistributedDataParallel(Plain(), planner="wfbp", check=False)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    steps_to_steady(ddp, optimizer)
    train(ddp, optimizer, 10)
    path = ""
    if dist.get_rank() == 0:
        path = str(ddp.save_report(folder))
    return {"path": path, "exposed": ddp.exposed_communication_s}


def trains_with_overlap(folder: str) -> list[str]:
    """Train on a network that is said to be slow, and write the report of a plan that won."""
    ddp = DistributedDataParallel(Plain(), network=SLOW)
    optimizer = ddp.overlap(OPTIMIZERS["sgd"](ddp.parameters()))
    with measured_as(planned_is_faster):
        steps_to_steady(ddp, optimizer)
    if dist.get_rank() == 0:
        ddp.save_report(folder)
    run = ddp.run_record()
    return [run.decision, run.planner]


def replans_after_drift() -> dict[str, Any]:
    """Let the model become slower for good and see it measured again."""
    extra_s, said_by_torch = 10.0, reducer_executor.logging_data

    class Slowing(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            add(extra_s)
            return super().forward(x)

    def logging_data(ddp: TorchDDP) -> dict[str, Any]:
        """Count what was added to Python's clock: torch's reducer reads one of its own."""
        return {**said_by_torch(ddp), "forward_compute_time": extra_s * NS_PER_S}

    with added_time() as add, mock.patch.object(reducer_executor, "logging_data", logging_data):
        ddp = DistributedDataParallel(Slowing())
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        steps_to_steady(ddp, optimizer)
        train(ddp, optimizer, 55)
        extra_s = 100.0
        phases = train(ddp, optimizer, 160)
    texts = [event.text for event in ddp.run_record().events]
    return {"phases": list(dict.fromkeys(phases)), "events": texts}


def unfit_averages() -> list[str]:
    """Return what is said of averages that are too few, and of one that has another shape."""
    ddp = DistributedDataParallel(Plain(), plan=plain_plan(), check=False)
    fitting = [p.detach().clone() for p in ddp.parameters()]
    said = []
    for averages in (fitting[1:], [torch.zeros(2), *fitting[1:]]):
        try:
            ddp.average(averages, 0.1)
        except UserError as error:
            said.append(str(error))
    return said


def wraps_twice(stock_outside: bool, inside: bool) -> str:
    """Wrap a model in both classes, and say how that is refused."""
    outer, inner = DistributedDataParallel, TorchDDP
    if stock_outside:
        outer, inner = inner, outer
    wrapped = inner(Plain())
    try:
        model = outer(nn.Sequential(wrapped) if inside else wrapped)
        model(torch.zeros(2, 1, 8, 8))
    except UserError as error:
        return str(error)
    return ""


def converts(options: dict[str, Any]) -> dict[str, Any]:
    """Train beside DDP with a wrapper that was converted, its optimizer overlapped late."""
    plan = plan_of(Plain(), list(PLAIN_SIZES), dist.get_world_size(), Style(piece_elements=4000))
    torch.manual_seed(1)
    stock = TorchDDP(Plain(), **options)
    theirs = OPTIMIZERS["adamw"](stock.parameters())
    ours = TorchDDP(copy.deepcopy(stock.module), **options)
    optimizer = OPTIMIZERS["adamw"](ours.parameters())
    same = DistributedDataParallel.convert(ours, plan=plan, check=False, overlap_optimizers=True)
    hooked = TorchDDP(Plain())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    refused = []
    for wrong in (hooked, ours):
        try:
            DistributedDataParallel.convert(wrong)
        except UserError as error:
            refused.append(str(error))
    train(stock, theirs, 8)
    train(same, optimizer, 8)
    return {
        "same": same is ours,
        "refused": refused,
        "metrics": same.metrics(),
        "defers": same.defers,
        "overlapped": [type(o.optimizer).__name__ for o in same._training.wrapped.optimizers],
        "differing": differing(same.module, stock.module),
    }
