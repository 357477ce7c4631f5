"""Write ``CLAIMS.md``: each claim of the papers, what we find, and a verdict.

Every figure in the page is filled in from ``results/*.json``, and so is the verdict, where it rests
on a figure.
"""

from __future__ import annotations

from collections.abc import Sequence

from reproduce import claims_dag, claims_gtopk, claims_mgwfbp, claims_pace, claims_pipeline
from reproduce.claim import Claim
from reproduce.common import FOLDER

__all__ = ["PAGE", "page"]

PAGE = FOLDER / "CLAIMS.md"

INTRODUCTION = """\
# The papers' claims

Written by `reproduce/claims.py` from `reproduce/results/*.json`; do not edit. `make reproduce` runs
the scripts and writes it again.

A verdict is one of four. **reproduced**: our simulation, counting or measurement agrees with the
claim. **differs**: it does not, and the text says how. **not comparable**: the printed figure is
the largest of several that the paper does not name, and ours are other cases. **not reproducible
here**: it takes the authors' clusters, models or data. Where a claim is about a measurement on a
cluster, what is compared is a simulation of it, unless the row says "measured"; that a simulation
agrees does not show that the measurement was right.

Assumptions that many rows rest on:

- ResNet-50 "on a K80" is Espresso's V100 trace, stretched so that its backward pass takes the
  0.243 s that dag-model prints for a K80. Layers need not take the same shares of time there.
- Espresso's traces hold no forward pass. It is taken as half of the backward pass, layer by layer.
- No layer times are at hand of GoogleNet, ResNet-152, DenseNet-161 and 201, Inception-v4,
  Transformer and Seq2Seq. Their layers come from the architectures, and divide the backward pass by
  their multiplications ("times by multiplications"); the forward pass is half of that. MG-WFBP's
  networks take longer than ResNet-50, whose time is printed, by the multiplications of their batch.
- MG-WFBP counts 161 tensors of ResNet-50 and writes of layers, of which 107 have parameters. Its
  networks are simulated both ways, with a message a tensor and a message a layer (weight and bias
  together). A claim is reproduced if it holds one way; the text gives both.
- In PACE's rows computation is stretched until it takes as long as the communication at the
  bandwidth of PACE's largest printed gain. So *where* the gain peaks is put in, and its height
  depends on the share of the forward pass, which is assumed. None is printed for Seq2Seq; 10 Gbit/s
  are taken.
- PACE's hosts have two workers each, which share a card; inside they exchange 10 GB/s. A message
  between hosts starts in 30 us, or in 5 us as over RDMA; PACE prints neither, and a claim is
  reproduced only if it holds with both.
- PACE's Horovod has the defaults of its time, a cycle of 5 ms and a buffer of 64 MiB, and each of
  its messages waits for a negotiation of two gathers and two broadcasts. The other baselines
  negotiate nothing.
- The link of MG-WFBP's cluster 1 (alpha, beta) comes from its line by the ring's row of Table 2.
- Figures agree if ratios are within 10 %, gains within 5 points and ranges within 2 points of the
  printed ones; nearly linear is 90 % or more. The tests are in `claims_*.py`.
- Of gTop-k, 20 % count as agreement with Table VII: three constants of its cluster are fitted to
  it. The numbers behind its Fig. 10 and 11, which are drawn only, are those of the authors' public
  code.
- `overlap` may have two messages in flight, so that one's latency hides behind another's
  transmission; the papers' planners have one.
"""


def page() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    counts: dict[str, int] = {}
    for title, claims in (
        ("dag-model: A DAG Model of Synchronous Stochastic Gradient Descent", claims_dag.CLAIMS),
        ("MG-WFBP: Merging Gradients Wisely", claims_mgwfbp.CLAIMS),
        ("PACE: Preemptive All-reduce Scheduling", claims_pace.CLAIMS),
        (
            "linear-pipeline: Efficient Communications in Training Large Scale Neural Networks",
            claims_pipeline.CLAIMS,
        ),
        (
            "gTop-k: A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification",
            claims_gtopk.CLAIMS,
        ),
    ):
        parts.append(f"\n## {title}\n\n{_table(claims, counts)}")
    total = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    return "".join(parts) + f"\n{sum(counts.values())} claims: {total}.\n"


def _table(claims: Sequence[Claim], counts: dict[str, int]) -> str:
    rows = ["| place | the paper says | we find | verdict | script |", "|---|---|---|---|---|"]
    for claim in claims:
        finding = claim.finding()
        counts[finding.verdict] = counts.get(finding.verdict, 0) + 1
        script = f"[{claim.script}]({claim.script}.py)" if claim.script else ""
        rows.append(
            f"| {claim.place} | {claim.says} | {finding.text} | **{finding.verdict}** | {script} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(f"claims: {PAGE.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()
