"""``syncline bench topk``: selecting the largest elements, beside torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console

from syncline.bench.topk.page import save_report
from syncline.bench.topk.table import print_selections
from syncline.cli.progress import Bar
from syncline.errors import UserError
from syncline.report.place import require_place

__all__ = ["topk"]

Number = TypeVar("Number", int, float)


@click.command()
@click.option(
    "--sizes",
    default="1e4,1e5,1e6,1e7,1e8",
    show_default=True,
    metavar="N,...",
    help="Elements of the vectors.",
)
@click.option(
    "--densities",
    default="0.01,0.001,0.0001",
    show_default=True,
    metavar="SHARE,...",
    help="Shares that are selected.",
)
@click.option("--rounds", type=int, default=5, show_default=True, help="Turns of every contestant.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="One core, or a GPU.",
)
@click.option("--report", metavar="DIR|FILE.html", help="Write a report.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def topk(
    sizes: str, densities: str, rounds: int, device: str, report: str | None, as_json: bool
) -> None:
    """Measure selection of the largest magnitudes beside torch.topk, on one core or a GPU."""
    from syncline.bench.topk.contest import measure

    if report is not None:
        require_place(Path(report))
    with Bar() as bar:
        measured = measure(
            _numbers(sizes, "--sizes", lambda text: int(float(text))),
            _numbers(densities, "--densities", float),
            rounds=rounds,
            device=device,
            progress=bar,
        )
    if report is not None:
        save_report(measured, Path(report))
    if as_json:
        click.echo(measured.to_json(), nl=False)
        return
    print_selections(Console(highlight=False), measured)
    if report is not None:
        click.echo(f"report written to {report}")


def _numbers(text: str, option: str, read: Callable[[str], Number]) -> list[Number]:
    try:
        return [read(part) for part in text.split(",")]
    except (ValueError, OverflowError):
        raise UserError(
            f"{option} {text!r}: expected numbers with commas between them, such as 1e6,1e7"
        ) from None
