"""gTop-k, Table VII, Fig. 10 and 11: training on its 32 machines, by its costs and by stages.

Eq. 5 to 7 count the links alone. The machines of Table III also have a PCIe lane of 250 MB/s, two
slow cores, and a switch between them. So three constants of that cluster are added as stages: what
its hosts take for each element of the model, what its switch passes in all, and what an entry
takes to be merged. What a GPU takes to select, and what the hosts take for each element, can be
read from Fig. 11 alone; then Table VII is predicted. Or all three are fitted to Table VII, so that
the largest of its errors is least; then each model is predicted by a fit to the other three.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from reproduce.common import BLUE, GREEN, GREY, ORANGE, RED, Result, figure, run
from reproduce.gtopk import DENSITY, FIG_10_WORKERS, LINK, MODELS, WORKERS, Published
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import Stage
from syncline.plan.network import Network
from syncline.plan.sparse_costs import SparseSpeeds, computing_line

NAME = "gtopk_table7"
DENSE, TOP_K, GTOP_K = "ring", "top-k", "gtop-k"
ALGORITHMS = (DENSE, TOP_K, GTOP_K)
ELEMENT_BYTES = 4
FROM_FIG_11 = ("alexnet", "resnet50")
"""The models whose bars give the constants; the others are predicted."""
OURS = SparseSpeeds(select_s_per_element=7.1e-10, merge_s_per_entry=1.09e-8)
"""Of one core of an AMD EPYC: ``syncline.train.measure.sparse``, 2026-11-22."""
STEPS, ROUNDS = 40, 4
SOUGHT = ((10e-9, 200e-9), (1e-11, 1e-8), (1e-9, 5e-6))
"""Where the fit looks: seconds an element, a byte through the switch, and an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The constants beside the link; 0: it takes no time."""

    select_s: float = 0.0
    """An element, of a sparse exchange: on the GPU."""
    host_s: float = 0.0
    """An element: what is copied and staged."""
    switch_s: float = 0.0
    """A byte of any worker."""
    merge_s: float = 0.0
    """An entry that a merge is given."""

    def exchange(self, algorithm: str, workers: int) -> CostCurve:
        """Return the cost of an exchange as a function of the bytes of the model."""
        sparse = algorithm != DENSE
        stages = []
        if self.host_s:
            stages.append(Stage(at="host", bytes_per_s=ELEMENT_BYTES / self.host_s))
        if self.switch_s:
            stages.append(Stage(at="switch", bytes_per_s=1 / self.switch_s))
        network = Network.of_link(
            LINK,
            workers=workers,
            algorithm=algorithm,
            density=DENSITY if sparse else None,
            stages=tuple(stages),
        )
        if not sparse:
            return network.all_reduce
        # Beside the network and not in it: with speeds its indices would be as narrow as ours.
        speeds = SparseSpeeds(select_s_per_element=self.select_s, merge_s_per_entry=self.merge_s)
        computing = computing_line(algorithm, workers=workers, density=DENSITY, speeds=speeds)
        return CostCurve.in_turn((network.all_reduce, computing))

    def iteration_s(self, model: Published, algorithm: str, workers: int = WORKERS) -> float:
        """Return an iteration in which nothing overlaps (section IV-E)."""
        cost = self.exchange(algorithm, workers)
        return model.iteration_s + cost.seconds(ELEMENT_BYTES * model.elements)


def measured_s(model: Published) -> dict[str, float]:
    """Return Table VII as seconds of an iteration."""
    images = WORKERS * model.batch
    return {a: images / speed for a, speed in zip(ALGORITHMS, model.table_7, strict=True)}


def worst(cluster: Cluster, models: Iterable[Published], algorithms: Sequence[str]) -> float:
    """Return the largest relative error over cells of Table VII."""
    return max(
        abs(cluster.iteration_s(model, a) / measured_s(model)[a] - 1)
        for model in models
        for a in algorithms
    )


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one minimum is least, by golden sections."""
    golden = 0.6180339887498949
    for _ in range(STEPS):
        inner = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, inner[1]) if cost(inner[0]) <= cost(inner[1]) else (inner[0], high)
    return (low + high) / 2


def fitted(models: Sequence[Published], start: Cluster) -> Cluster:
    """Return the cluster whose largest error over a column is least, column by column.

    Each constant governs a column: the host that of gTop-k, the switch the dense one, merging that
    of Top-k. Each column's largest error has one minimum in its constant.
    """
    found = start
    columns = zip(("host_s", "switch_s", "merge_s"), (GTOP_K, DENSE, TOP_K), SOUGHT, strict=True)
    for field, column, (low, high) in list(columns) * ROUNDS:

        def error(value: float, at: Cluster = found, field: str = field, of: str = column) -> float:
            return worst(replace(at, **{field: value}), models, (of,))

        found = replace(found, **{field: _least(error, low, high)})
    return found


def _errors(cluster: Cluster) -> dict[str, dict[str, float]]:
    return {
        name: {a: cluster.iteration_s(model, a) / measured_s(model)[a] - 1 for a in ALGORITHMS}
        for name, model in MODELS.items()
    }


def _fig_11(cluster: Cluster) -> Result:
    """Return Fig. 11's seconds beside ours, without and with the stages."""
    found = {}
    for name, model in MODELS.items():
        size = ELEMENT_BYTES * model.elements
        link_s = Cluster().exchange(GTOP_K, WORKERS).seconds(size)
        staged_s = replace(cluster, select_s=0.0).exchange(GTOP_K, WORKERS).seconds(size)
        _, compressing_s, communicating_s = model.fig_11
        found[name] = {
            "communicating_s": communicating_s,
            "by_eq_7_s": link_s,
            "with_hosts_s": staged_s,
            "error_of_eq_7": link_s / communicating_s - 1,
            "error_with_hosts": staged_s / communicating_s - 1,
            "compressing_s": compressing_s,
            "selecting_s": cluster.select_s * model.elements,
        }
    return found


def _fig_10(cluster: Cluster) -> Result:
    """Return gTop-k's errors, and the switch that the dense bars imply, by workers."""
    errors = {
        name: [
            cluster.iteration_s(model, GTOP_K, workers) / (model.batch / speed) - 1
            for workers, speed in zip(FIG_10_WORKERS, model.fig_10[GTOP_K], strict=True)
        ]
        for name, model in MODELS.items()
    }
    alexnet = MODELS["alexnet"]
    implied = [
        2
        * (workers - 1)
        * ELEMENT_BYTES
        * alexnet.elements
        / (alexnet.batch / speed - alexnet.iteration_s)
        for workers, speed in zip(FIG_10_WORKERS, alexnet.fig_10[DENSE], strict=True)
    ]
    return {
        "workers": FIG_10_WORKERS,
        "errors_of_gtopk": errors,
        "dense_alexnet_bytes_per_s": implied,
        "vgg16_table_7_and_fig_10": [
            MODELS["vgg16"].table_7[2],
            WORKERS * MODELS["vgg16"].fig_10[GTOP_K][-1],
        ],
    }


def compute() -> Result:
    """Predict Table VII by the paper's costs, by Fig. 11's constants, and by a fit."""
    of_fig_11 = [MODELS[name] for name in FROM_FIG_11]
    eq_7 = Cluster().exchange(GTOP_K, WORKERS)
    read = Cluster(
        select_s=statistics.mean(m.fig_11[1] / m.elements for m in of_fig_11),
        host_s=statistics.mean(
            (m.fig_11[2] - eq_7.seconds(ELEMENT_BYTES * m.elements)) / m.elements for m in of_fig_11
        ),
    )
    models = list(MODELS.values())
    best = fitted(models, read)
    from_fig_11 = replace(best, host_s=read.host_s)
    ours = Cluster(select_s=OURS.select_s_per_element, merge_s=OURS.merge_s_per_entry)
    left_out = {}
    for name, model in MODELS.items():
        others = fitted([m for m in models if m is not model], read)
        left_out[name] = {
            a: others.iteration_s(model, a) / measured_s(model)[a] - 1 for a in ALGORITHMS
        }
    kinds = {
        "its costs": Cluster(),
        "selecting and merging as here": ours,
        "hosts as in Fig. 11": from_fig_11,
        "fitted": best,
    }
    return {
        "source": "gTop-k, Table VII, Fig. 10 and 11",
        "workers": WORKERS,
        "density": DENSITY,
        "elements": {name: model.elements for name, model in MODELS.items()},
        "of_fig_11": {"select_s": read.select_s, "host_s": read.host_s},
        "fitted": {
            "select_s": best.select_s,
            "host_s": best.host_s,
            "switch_bytes_per_s": 1 / best.switch_s,
            "merge_s": best.merge_s,
        },
        "measured_s": {name: measured_s(model) for name, model in MODELS.items()},
        "predicted_s": {
            kind: {
                name: {a: cluster.iteration_s(model, a) for a in ALGORITHMS}
                for name, model in MODELS.items()
            }
            for kind, cluster in kinds.items()
        },
        "errors": {kind: _errors(cluster) for kind, cluster in kinds.items()},
        "errors_left_out": left_out,
        "fig_11": _fig_11(read),
        "fig_10": _fig_10(read),
    }


def draw(result: Result) -> Figure:
    """Draw Table VII, measured and predicted, and gTop-k's gains."""
    made, axes = figure(2, 2, width=9.6, height=6.6)
    kinds = {
        "its costs": ("its costs", ORANGE),
        "hosts as in Fig. 11": ("hosts as in Fig. 11", BLUE),
        "fitted": ("three constants fitted", GREEN),
    }
    titles = {DENSE: "dense", TOP_K: "Top-k", GTOP_K: "gTop-k"}
    names = [MODELS[name].title for name in result["measured_s"]]
    places = range(len(names))
    for axis, algorithm in zip(axes, ALGORITHMS, strict=False):
        rows = {"measured": (result["measured_s"], GREY)}
        rows |= {label: (result["predicted_s"][kind], c) for kind, (label, c) in kinds.items()}
        for number, (label, (seconds, colour)) in enumerate(rows.items()):
            axis.bar(
                [place + (number - 1.5) * 0.2 for place in places],
                [seconds[name][algorithm] for name in seconds],
                width=0.19,
                color=colour,
                label=label,
            )
        axis.set_yscale("log")
        axis.set_ylabel("s an iteration")
        axis.set_title(f"Table VII, {titles[algorithm]}")
        axis.set_xticks(places, names, fontsize=8)
    split = axes[3]
    for number, (label, key, colour) in enumerate(
        (
            ("drawn in the paper", "communicating_s", GREY),
            ("Eq. 7", "by_eq_7_s", ORANGE),
            ("Eq. 7 and hosts", "with_hosts_s", RED),
        )
    ):
        split.bar(
            [place + (number - 1) * 0.25 for place in places],
            [row[key] for row in result["fig_11"].values()],
            width=0.24,
            color=colour,
            label=label,
        )
    split.set_yscale("log")
    split.set_title("Fig. 11: communicating, gTop-k")
    split.set_xticks(places, names, fontsize=8)
    split.set_ylim(top=20)
    split.legend()
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return made


def main() -> None:
    """Run the script."""
    run(NAME, compute, draw)


if __name__ == "__main__":
    main()
