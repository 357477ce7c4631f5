"""``Sharding``: which elements of the parameters each rank updates, and how all ranks get them.

Source: ZeRO, stage 1 (Rajbhandari et al., 2020). Instead of shares of the whole, each rank has a
share of every message, as its reduce-scatter leaves it.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from syncline.errors import UserError
from syncline.plan.plan import Plan, Tensor
from syncline.plan.planners.dtypes import apart
from syncline.torch_private import all_gather_base
from syncline.train.engine.dense_transport import places_in
from syncline.train.engine.layout import BucketLayout, even_part, sum_shares
from syncline.train.measure.exchange import gather_numbers, telling_lost_peers
from syncline.train.measure.keepalive import keepalive
from syncline.train.overlap.trial import is_of_elements, parameters_of
from syncline.train.sparse.gradients import flat, shaped

BLOCK_ELEMENTS = 4 * 1024 * 1024  # how many are sharded together if there is no plan of sums
BATCH_ELEMENTS = 16 * 1024 * 1024  # state moves between ranks in batches of this size

Span = tuple[int, int]  # elements ``[start, stop)`` of a parameter, in the order of its memory
Spans = list[list[Span]]  # of each parameter: the spans that one rank has, in order


class Sharding:
    """Shares of a model's exchanged parameters, and the state of the optimizers that update them.

    ``parameters`` are the exchanged ones by name, ``tensors`` the same as a plan lists them. All
    ranks of the group must call the methods that say so, in the same order.

    Raises:
        UserError: a parameter's memory has gaps.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.index_of = {id(p): index for index, p in enumerate(self.parameters)}
        self.optimizers: list[Optimizer] = []
        self.group, self._workers, self.rank = group, group.size(), group.rank()
        for name, parameter in parameters.items():
            if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
                raise UserError(
                    f"overlap(shard=True): parameter {name!r} has strides {parameter.stride()}, "
                    "which leave gaps in its memory; give it memory of its own"
                )
        total = sum(tensor.elements for tensor in tensors)
        stops = [*range(BLOCK_ELEMENTS, total, BLOCK_ELEMENTS), total]
        self._share_out(apart(Plan.cut("", "", self._workers, tuple(tensors), stops)))

    def _share_out(self, plan: Plan) -> None:
        """Give each rank its share of every all-reduce or reduce-scatter of a plan."""
        order = [self.names.index(tensor.name) for tensor in plan.tensors]
        layout = BucketLayout.of(plan)
        self._blocks: list[list[list[tuple[int, int, int]]]] = []
        """Of each such message and rank: elements ``(parameter, start, stop)``."""
        self._spans: list[Spans] = [[[] for _ in order] for _ in range(self._workers)]
        for number, message in enumerate(plan.messages):
            if message.collective == "all-gather":
                continue
            self._blocks.append([])
            for rank, (begin, end) in enumerate(sum_shares(message, self._workers)):
                found = layout.parts(number, begin, end)
                parts = [(order[part.tensor], part.start, part.stop) for part in found]
                self._blocks[-1].append(parts)
                for index, start, stop in parts:
                    self._spans[rank][index].append((start, stop))
        for some in itertools.chain(*self._spans):
            some.sort()

    def own(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a parameter's values: a view if one span, else a copy."""
        parts = [flat(values)[start:stop] for start, stop in self._spans[self.rank][index]]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, flat(values)[:0]])

    def put(self, index: int, share: torch.Tensor) -> None:
        """Write a share back into its parameter, if :meth:`own` has copied it."""
        spans, offset = self._spans[self.rank][index], 0
        for start, stop in spans if len(spans) > 1 else ():
            flat(self.parameters[index].detach())[start:stop] = share[offset:][: stop - start]
            offset += stop - start

    @torch.no_grad()
    def gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather all ranks' shares of some parameters; all ranks call with the same ones."""
        chosen = {self.index_of[id(parameter)] for parameter in parameters}
        for block in self._blocks:
            parts = [
                [flat(self.parameters[i].detach())[a:b] for i, a, b in some if i in chosen]
                for some in block
            ]
            longest = max(sum(map(len, some)) for some in parts)
            if not longest:
                continue
            sent = next(part for some in parts for part in some).new_empty(longest)
            arrived = sent.new_empty(longest * self._workers)
            own = parts[self.rank]
            for part, place in zip(own, places_in(sent, map(len, own)), strict=True):
                place.copy_(part)
            with telling_lost_peers("while updated parameters were gathered"):
                all_gather_base(self.group, _bytes(arrived), _bytes(sent)).wait()
            for row, some in zip(arrived.split(longest), parts, strict=True):
                if some is not own:
                    for part, place in zip(some, places_in(row, map(len, some)), strict=True):
                        part.copy_(place)

    def require_same(self, gradients: Iterable[torch.Tensor], *, look: bool) -> None:
        """Raise a UserError if any rank sets ``look`` and gradients differ; all ranks call."""
        own = sum(float(g.detach().to(torch.complex128).abs().sum()) for g in gradients if look)
        everyone = gather_numbers([look, own], self.group, self.parameters[0].device)
        if any(look for look, _ in everyone) and any(row != everyone[0] for row in everyone):
            raise UserError(
                "overlap(shard=True): the ranks' gradients differ at a step, as after a backward "
                "pass under no_sync() that follows the exchanged one; make the last backward pass "
                "before a step without no_sync()"
            )

    def follow(self, plan: Plan) -> None:
        """Share out by another plan, and move the optimizers' state to match; all ranks call."""
        old = self._spans
        self._share_out(plan)
        for optimizer in self.optimizers if self._spans != old else ():
            self._move(optimizer, old)

    def _move(self, optimizer: Optimizer, old: Sequence[Spans]) -> None:
        """Move an optimizer's state from the old spans to the present ones; all ranks call."""
        for index, state in self._moved(optimizer, old, self._spans).items():
            optimizer.state.pop(self.parameters[index], None)
            if state:
                optimizer.state[self.parameters[index]] = state

    def even_state(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Return the state of this rank's even parts, by parameter; all ranks call."""
        return self._moved(optimizer, self._spans, self._even_spans())

    def take_even_state(self, optimizer: Optimizer, state: Mapping[int, dict[str, Any]]) -> None:
        """Give an optimizer the state whose even part this rank holds; all ranks call."""
        for index, parameter in enumerate(self.parameters):
            optimizer.state.pop(parameter, None)
            if index in state:
                optimizer.state[parameter] = state[index]
        self._move(optimizer, self._even_spans())

    def _even_spans(self) -> list[Spans]:
        """Return each rank's spans if every parameter is cut as ``torch.chunk`` cuts it."""
        return [
            [
                [span] if (span := even_part(p.numel(), self._workers, rank))[0] < span[1] else []
                for p in self.parameters
            ]
            for rank in range(self._workers)
        ]

    def full_state(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Return the whole state by parameter, on rank 0's CPU; empty elsewhere; all ranks call."""
        everything: Spans = [[(0, p.numel())] for p in self.parameters]
        nothing: Spans = [[] for _ in self.parameters]
        to = [everything, *[nothing] * (self._workers - 1)]
        return {
            index: {
                name: shaped(value, like) if _is_share(value, like.numel()) else value
                for name, value in state.items()
            }
            for index, state in self._moved(optimizer, self._spans, to, whole=True).items()
            for like in (self.parameters[index],)
        }

    def cut_state(self, index: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's share of a parameter's whole state; UserError if shapes differ."""
        parameter, found = self.parameters[index], {}
        for name, value in state.items() if self._spans[self.rank][index] else ():
            if not is_of_elements(name, value, parameter):
                found[name] = value
                continue
            if value.shape != parameter.shape:
                raise UserError(
                    f"the state {name!r} of parameter {self.names[index]!r} has shape "
                    f"{tuple(value.shape)}, the parameter {tuple(parameter.shape)}; load what "
                    "model.full_state_dict(optimizer) returned, or an unsharded state_dict()"
                )
            ordered = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
            found[name] = self.own(index, ordered.detach().copy_(value)).clone()
        return found

    def _moved(
        self,
        optimizer: Optimizer,
        old: Sequence[Spans],
        new: Sequence[Spans],
        *,
        whole: bool = False,
    ) -> dict[int, dict[str, Any]]:
        """Return the state of this rank's ``new`` spans, on the CPU if ``whole``; all call."""
        members = [p for p in parameters_of(optimizer) if id(p) in self.index_of]
        found: dict[int, dict[str, Any]] = {self.index_of[id(p)]: {} for p in members}
        for batch in in_batches(members, BATCH_ELEMENTS):
            parcels: list[dict[int, dict[str, Any]]] = [{} for _ in new]
            for parameter in batch:
                index = self.index_of[id(parameter)]
                own, state = old[self.rank][index], optimizer.state.get(parameter, {})
                size = sum(stop - start for start, stop in own)
                for parcel, spans in zip(parcels, new, strict=True):
                    runs = list(common_elements(own, spans[index]))
                    if runs:
                        parcel[index] = {
                            name: torch.cat([value[a : a + n] for a, _, n in runs]).cpu()
                            if _is_share(value, size)
                            else value
                            for name, value in state.items()
                        }
            for other, parcel in enumerate(self._swapped(parcels)):
                for index, state in parcel.items():
                    runs = list(common_elements(old[other][index], new[self.rank][index]))
                    size = sum(stop - start for start, stop in new[self.rank][index])
                    for name, value in state.items():
                        if not _is_share(value, sum(n for _, _, n in runs)):
                            found[index][name] = value
                            continue
                        device = "cpu" if whole else self.parameters[index].device
                        place = found[index].setdefault(name, value.new_empty(size, device=device))
                        sizes = [n for _, _, n in runs]
                        for (_, at, n), part in zip(runs, value.split(sizes), strict=True):
                            place[at : at + n] = part
        return found

    def _swapped(self, parcels: Sequence[Any]) -> list[Any]:
        """Send every rank its parcel of tensors and plain values; return each rank's parcel."""
        texts = list(map(packed, parcels))
        device = self.parameters[0].device
        sizes = gather_numbers([len(text) for text in texts], self.group, device)
        arriving = [int(row[self.rank]) for row in sizes]
        arrived = torch.empty(sum(arriving), dtype=torch.uint8, device=device)
        with telling_lost_peers("while the optimizer's state was moved between ranks"):
            dist.all_to_all_single(
                keepalive(arrived),
                keepalive(torch.cat(texts).to(device)),
                arriving,
                [len(text) for text in texts],
                group=self.group,
            )

        def here(memory: Any, place: str) -> Any:  # GPU numbers differ between ranks
            return memory if place == "cpu" else memory.cuda(device)

        return [unpacked(part.cpu(), here) for part in arrived.split(arriving)]


def packed(value: Any) -> torch.Tensor:
    """Return plain values and tensors as one tensor of bytes."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(value: torch.Tensor, map_location: Any = "cpu") -> Any:
    """Return what :func:`packed` was given; for ``map_location`` see ``torch.load``."""
    file = io.BytesIO(value.numpy().tobytes())
    return torch.load(file, map_location=map_location, weights_only=True)


def in_batches(parameters: Iterable[nn.Parameter], elements: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in order, in batches of about ``elements`` elements."""
    listed = list(parameters)
    ends = itertools.accumulate(parameter.numel() for parameter in listed)
    numbered = zip((end // elements for end in ends), listed, strict=True)
    for _, batch in itertools.groupby(numbered, key=lambda row: row[0]):
        yield [parameter for _, parameter in batch]


def _is_share(value: Any, elements: int) -> bool:
    """Whether a part of a rank's state has one number for each of its elements."""
    return isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() == elements > 0


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return keepalive(values.view(torch.uint8))


def common_elements(given: Sequence[Span], taken: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Yield each common run of two lists of spans: its place in each list, and its size.

    A place counts the elements of the list before it.
    """
    offset = 0
    for start, stop in given:
        place = 0
        for begin, end in taken:
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield offset + first - start, place + first - begin, last - first
            place += end - begin
        offset += stop - start
