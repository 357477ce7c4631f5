"""The models of the gTop-k paper's speed tables."""

from __future__ import annotations

import pytest
from benchmarks.gtopk_table import BUTTERFLY, DENSE, GTOP_K, TOP_K, row
from benchmarks.sparse_models import PAPER

from syncline.model.sparse_costs import SparseSpeeds


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        # As torchvision counts them; ResNet-20 as its authors: 0.27 million.
        ("vgg16", 138_357_544),
        ("resnet20", 269_722),
        ("alexnet", 61_100_840),
        ("resnet50", 25_557_032),
    ],
)
def test_sizes_and_times(name: str, elements: int) -> None:
    published = PAPER[name]
    assert published.model.elements == elements
    assert published.profile().computation_s == pytest.approx(published.iteration_s)


def test_the_papers_own_costs() -> None:
    """Eq. 5 to 7 for VGG-16 on 32 workers: dense agrees with Table VII, sparse does not."""
    free = SparseSpeeds(select_s_per_element=0.0, merge_s_per_entry=0.0)
    kinds = row(PAPER["vgg16"], free)
    size = 4 * 138_357_544
    k = 0.001 * size
    said = kinds["its costs"]
    assert said[DENSE] == pytest.approx(0.097 + 62 * 0.436e-3 + 2 * 31 / 32 * size * 9e-9)
    assert said[TOP_K] == pytest.approx(0.097 + 5 * 0.436e-3 + 2 * 31 * k * 9e-9)
    assert said[GTOP_K] == pytest.approx(0.097 + 10 * 0.436e-3 + 20 * k * 9e-9)
    assert said[BUTTERFLY] - 0.097 == pytest.approx((said[GTOP_K] - 0.097) / 2)
    assert kinds["paper"][DENSE] == pytest.approx(said[DENSE], rel=0.05)
    assert kinds["paper"][GTOP_K] > 5 * said[GTOP_K]
