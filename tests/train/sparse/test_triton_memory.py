"""Selection by kernels in Triton against the native core, bit for bit; see ``tests/conftest.py``.

Where there is no GPU, Triton's interpreter runs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from syncline.train.sparse import selection_kernels, triton_memory
from syncline.train.sparse.memory import Tracked
from syncline.train.sparse.torch_memory import CudaMemory, TorchMemory, selection_on
from syncline.train.sparse.triton_memory import TritonMemory, select
from syncline.train.sparse.vector import SparseVector
from tests.train.sparse.test_memory import (
    HOST,
    Rows,
    bits,
    odd,
    require_same,
    several_units,
    taken_by,
)
from tests.train.sparse.vectors import SHAPES, Dense, assert_same, dense_vectors, shaped

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VERSIONS = [tuple(map(int, each.__version__.split(".")[:2])) for each in (triton, np)]
FAILS = VERSIONS[0] < (3, 9) and VERSIONS[1] >= (2, 4)
pytestmark = [
    pytest.mark.gpu
    if DEVICE.type == "cuda"
    else pytest.mark.skipif(
        FAILS, reason="the interpreter of Triton before 3.9 fails with numpy 2.4"
    )
]
TRITON = TritonMemory(DEVICE)
Kind = torch.dtype
KINDS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.slow
@given(several_units(), st.data(), st.sampled_from([0.0, 0.5, 0.9]))
def test_both_take_the_same(rows: Rows, data: st.DataObject, momentum: float) -> None:
    """Entries, and everything that is left: ties, zeros, NaN, infinities, empty parts, all."""
    require_same(TRITON, rows, [data.draw(st.integers(0, 45)) for _ in rows], momentum)


@pytest.mark.slow
@given(dense_vectors(), st.data(), st.sampled_from(KINDS))
def test_values_of_any_kind(dense: Dense, data: st.DataObject, kind: Kind) -> None:
    """Selection alone, which changes nothing, and gradients of 16 bits added to a residual."""
    if len(dense):
        dense[data.draw(st.integers(0, len(dense) - 1))] = data.draw(odd | st.just(0.0))
    k = data.draw(st.integers(0, len(dense) + 1))
    with np.errstate(all="ignore"):
        values = torch.from_numpy(dense).to(kind)
    there = values.to(DEVICE, copy=True)
    order = sorted(range(len(values)), key=lambda i: (-magnitudes(values)[i], i))
    expected = sorted(i for i in order[:k] if magnitudes(values)[i])
    if len(values):
        assert TRITON.largest(there, k).tolist() == expected
        assert bits(there.float()).equal(bits(values.float()))
    plain = Tracked(torch.ones(len(values)), values.float())
    narrow = Tracked(torch.ones(len(values), device=DEVICE), there)
    native, found = taken_by(HOST, [[plain]], [k]), taken_by(TRITON, [[narrow]], [k])
    assert isinstance(native, int) == isinstance(found, int)
    if isinstance(native, SparseVector):
        assert_same(found, native)
        assert bits(narrow.residual).equal(bits(plain.residual))


def magnitudes(values: torch.Tensor) -> list[int]:
    return (values.float().view(torch.int32) & 0x7FFFFFFF).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_vectors_that_are_sampled(shape: str) -> None:
    """Several tiles and parts, some of which mislead the sample."""
    elements = triton_memory.SAMPLED_FROM + 5000
    dense = shaped(shape, elements)
    zeros = np.zeros_like(dense)
    cuts = (0, 7, 40_000, 40_000, elements)
    parts = [[dense[a:b], zeros[a:b]] for a, b in pairwise(cuts)]
    require_same(TRITON, [parts, parts[:1]], [70, 3])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_large_vectors_of_many_shapes(shape: str) -> None:
    for k in (1, 1000, 10_000, triton_memory.MOST_TAKEN + 1):  # so many torch takes
        dense = shaped(shape, max(k, 2 * triton_memory.SAMPLED_FROM + 5003))
        require_same(TRITON, [[[dense, np.zeros_like(dense)]]], [k])


def selects(dense: Dense, k: int) -> bool:
    """Say whether the kernels select, and need nobody to do it for them."""
    values = torch.from_numpy(dense).to(DEVICE)
    return select([[Tracked(values, values)]], [k])[0].item() == selection_kernels.DONE


def test_what_the_kernels_leave_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that were too high, or leave many: the result is the same, and later."""
    elements = triton_memory.SAMPLED_FROM + 5000
    normal = shaped("normal", elements)
    assert selects(normal, 70)
    assert selects(shaped("columns", elements), 70)
    assert selects(shaped("few values", elements), 700)
    assert not selects(shaped("equal", elements), 70)
    for name, value in (("CANDIDATES", 0), ("MOST_TAKEN", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(triton_memory, name, value)
            patch.setattr(triton_memory, "SAMPLED_FROM", 1024)
            triton_memory.table.cache_clear()
            assert not selects(normal, 2000)
            require_same(TRITON, [[[normal, np.zeros_like(normal)]]], [2000])
    triton_memory.table.cache_clear()
    monkeypatch.setattr(triton_memory, "guessed_rank", lambda _elements, _k: 1)
    assert not selects(normal, 71)
    require_same(TRITON, [[[normal, np.zeros_like(normal)]]], [71])
    triton_memory.table.cache_clear()


def test_a_gpu_selects_by_triton(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonMemory, "take", lambda *_, **__: "by Triton")
    memory = CudaMemory.__new__(CudaMemory)
    TorchMemory.__init__(memory, DEVICE)
    assert memory.take([], [], momentum=0.0) == "by Triton"
    assert not caplog.records


def test_without_triton_torch_selects_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonMemory, "largest", fails)
    assert type(selection_on(DEVICE)) is TorchMemory
    assert "selected by torch.topk, which is slower" in caplog.text
    assert "RuntimeError: Failed to find C compiler" in caplog.text


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
import triton.language as tl
from syncline.train.sparse import selection_kernels as kernels

WIDE = {"parts", "units", "before", "addresses"}
def compiled(kernel, warps, **constants):
    kinds = {name: "*i64" if name in WIDE else "*i32" for name in kernel.arg_names}
    kinds |= {"kept": "*i16", "values": "*fp32"}
    signature = {name: kinds[name] for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    made = compile(
        ASTSource(kernel, signature, at), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    assert made.asm["cubin"]

for values, gradients in (
    (tl.float32, tl.float32), (tl.float32, tl.bfloat16), (tl.float16, None)
):
    kinds = {"VALUES": values, "GRADIENTS": gradients}
    compiled(kernels.guess, 32, **kinds)
    for parts in (1, 64):
        compiled(kernels.scan, 8, PARTS=parts, **kinds)
    size = 4 if values is tl.float32 else 2
    compiled(kernels.finish, 32, VALUES=values, VALUE_BYTES=size, CLEAR=gradients is not None)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """Triton's compiler needs no GPU."""
    apart = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    apart["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", COMPILED], check=True, env=apart)
