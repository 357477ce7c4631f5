"""Chakra traces: ours come back as they were, others with inferred phases."""

from __future__ import annotations

import io
import itertools
import tarfile
from array import array
from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given

from syncline.errors import FileError, UserError
from syncline.files.traces.chakra import Graph, read_chakra, write_chakra
from syncline.files.traces.chakra_nodes import (
    CollectiveType,
    Metadata,
    Node,
    NodeType,
    encode,
    is_metadata,
    read_nodes,
)
from syncline.files.traces.trace import Trace
from syncline.plan.network import PRESETS
from syncline.plan.profile import Operation, Profile, Resource
from tests.files.traces.seeds import chakra_of_ours, chakra_of_pytorch, layered_profile
from tests.strategies import many, profiles
from tests.trace_files import TRACES

REAL = TRACES.parent / "et" / "chakra_feeder_trace.tar.gz"
NONE = array("Q")


def _read(tmp_path: Path, content: bytes) -> Trace:
    path = tmp_path / "rank.0.et"
    path.write_bytes(content)
    return read_chakra(path)


def _node(
    node_id: int, kind: NodeType = NodeType.COMP, *data: int, name: str = "", **about: int
) -> Node:
    return Node(node_id, name or f"n{node_id}", kind, array("Q", data), NONE, 10, about)


def _sum(node_id: int, *data: int, size: int = 400, **about: int) -> Node:
    about = {"comm_type": CollectiveType.ALL_REDUCE, "comm_size": size} | about
    return _node(node_id, NodeType.COMM_COLL, *data, **about)


def _file(*nodes: Node) -> bytes:
    return encode(Metadata("0.0.4")) + b"".join(map(encode, nodes))


# ------------------------------------------------------------------ ours


@given(profiles())
@many
def test_our_own_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, profile: Profile
) -> None:
    profile = msgspec.structs.replace(profile, baseline=None)
    written = write_chakra(profile, PRESETS["10gbe-k80"])
    assert written.lost == ()
    assert is_metadata(written.content)
    path = tmp_path_factory.mktemp("chakra") / "x.et"
    path.write_bytes(written.content)
    trace = read_chakra(path)
    assert trace.profile == profile
    assert trace.workers == 16


def test_operations_of_every_resource_come_back(tmp_path: Path) -> None:
    profile = layered_profile()
    resources = itertools.cycle(get_args(Resource))
    operations = tuple(
        msgspec.structs.replace(operation, resource=resource)
        for operation, resource in zip(profile.operations, resources, strict=False)
    )
    profile = msgspec.structs.replace(profile, operations=operations)
    path = tmp_path / "x.et"
    path.write_bytes(write_chakra(profile, PRESETS["10gbe-k80"]).content)
    assert read_chakra(path).profile == profile
    assert Profile.from_json(profile.to_json()) == profile


def test_what_is_lost_is_said() -> None:
    assert [s.partition(":")[0] for s in write_chakra(layered_profile()).lost] == [
        "the time of communication"
    ]


def test_a_feeder_finds_what_it_asks_for() -> None:
    """ASTRA-sim reads duration, type, bytes and ``is_cpu_op``, and needs an acyclic graph."""
    network = PRESETS["10gbe-k80"]
    profile = layered_profile()
    path_nodes = list(
        read_nodes(
            io.BytesIO(write_chakra(profile, network).content),
            ("is_cpu_op", "comm_type", "comm_size"),
        )
    )
    metadata, *nodes = path_nodes
    assert isinstance(metadata, Metadata)
    assert metadata.version == "0.0.4"
    known: set[int] = set()
    last = {0: 0, 1: 0}
    sent = []
    for node in nodes:
        assert isinstance(node, Node)
        assert node.id not in known
        assert known.issuperset(node.data_deps)
        assert known.issuperset(node.ctrl_deps)
        known.add(node.id)
        if node.type == NodeType.COMM_COLL:
            assert node.attributes["comm_type"] == CollectiveType.ALL_REDUCE
            size = node.integer("comm_size")
            assert node.duration_us == round(network.all_reduce.seconds(size) * 1e6)
            sent.append(node.id)
        else:
            assert node.type == NodeType.COMP
            lane = node.integer("is_cpu_op")
            assert list(node.ctrl_deps) == ([last[lane]] if last[lane] else [])
            last[lane] = node.id
    assert len(sent) == len(profile.gradients)


def test_update_waits_for_all_messages() -> None:
    profile = layered_profile()
    update = Operation(name="update", phase="update", duration_s=1e-3, after=(0,))
    profile = msgspec.structs.replace(profile, operations=(*profile.operations, update))
    nodes = list(read_nodes(io.BytesIO(write_chakra(profile).content), ()))[1:]
    messages = {n.id for n in nodes if isinstance(n, Node) and n.type == NodeType.COMM_COLL}
    assert isinstance(nodes[-1], Node)
    assert messages < set(nodes[-1].data_deps)


def test_another_form_of_ours_is_refused(tmp_path: Path) -> None:
    content = encode(Metadata("0.0.4", {"syncline": 9})) + encode(_node(1))
    with pytest.raises(FileError, match=r"expected form 1 .* the file has 9"):
        _read(tmp_path, content)


# ------------------------------------------------------------------ others'


def test_launches_and_kernels(tmp_path: Path) -> None:
    trace = _read(tmp_path, chakra_of_pytorch())
    profile = trace.known_profile()
    assert [(o.phase, o.resource) for o in profile.operations] == [
        ("forward", "host"),
        ("forward", "device"),
        ("backward", "host"),
        ("backward", "device"),
        ("backward", "host"),  # launches the first message
        ("backward", "device"),  # and stands for the event that it waits for
        ("backward", "host"),
        ("backward", "device"),
        ("backward", "host"),
        ("backward", "device"),
        ("update", "host"),
        ("update", "device"),
    ]
    assert [g.size_bytes for g in profile.gradients] == [8196, 16392]
    # 30 us of launching, then the kernels that were given to the stream before the event.
    assert profile.ready_ns() == [2_730_000, 3_230_000]
    assert [(p.size_bytes, p.time_s) for p in trace.points] == [
        (8196, pytest.approx(700e-6)),
        (16392, pytest.approx(1400e-6)),
    ]
    assert "1 messages of kind BROADCAST are left out" in trace.notes
    assert any("dependencies are on nodes that the file does not hold" in n for n in trace.notes)


def test_data_loading_and_copying_are_recognised_by_name_and_type(tmp_path: Path) -> None:
    nodes = (
        _node(1, name="DataLoader.next"),
        _node(2, NodeType.MEM_LOAD, 1),
        _node(3, NodeType.COMP, 2),
        _node(4, NodeType.COMP, 3, name="COMP_NODE_conv1_BWD_WG"),
        _sum(5, 4),
        _node(6, NodeType.COMP, 5, name="Optimizer.step"),
        _node(7, NodeType.COMP, 5, name="copy back"),
    )
    profile = _read(tmp_path, _file(*nodes)).known_profile()
    assert [o.phase for o in profile.operations] == [
        "data",
        "copy",
        "forward",
        "backward",
        "update",
        "finalize",
    ]
    assert profile.gradients[0].ready_after == 3


def test_what_lies_between_is_passed_through(tmp_path: Path) -> None:
    nodes = (
        _node(1, name="wgrad"),
        _node(2, NodeType.METADATA, 1),
        _node(3, NodeType.COMM_SEND, 2),
        _sum(4, 3, size=6),
    )
    trace = _read(tmp_path, _file(*nodes))
    (gradient,) = trace.known_profile().gradients
    assert (gradient.elements, gradient.dtype, gradient.ready_after) == (3, "float16", 0)
    assert "1 messages of kind COMM_SEND are left out" in trace.notes
    with pytest.raises(UserError, match="messages of 1 different sizes"):
        trace.network(4)


def test_control_dependencies_with_cycles_are_not_used(tmp_path: Path) -> None:
    one = _node(1)._replace(ctrl_deps=array("Q", [2]))
    two = _node(2, NodeType.COMP, 1)
    trace = _read(tmp_path, _file(one, two, _sum(3, 2)))
    assert "the control dependencies have cycles and were not used" in trace.notes
    assert [o.name for o in trace.known_profile().operations] == ["n1", "n2"]


def test_control_dependencies_order_nodes(tmp_path: Path) -> None:
    late = _node(1)._replace(ctrl_deps=array("Q", [2]))
    trace = _read(tmp_path, _file(late, _node(2), _sum(3, 1)))
    assert [o.name for o in trace.known_profile().operations] == ["n2", "n1"]
    assert trace.known_profile().operations[1].after == (0,)


def test_a_long_chain_is_no_recursion() -> None:
    nodes = [_node(i, NodeType.COMP, *([i - 1] if i else [])) for i in range(3000)]
    assert Graph.of(nodes[::-1]).nodes == nodes
    nodes[0] = _node(0, NodeType.COMP, 2999)
    with pytest.raises(UserError, match=r"the data dependencies have a cycle: .* 2996 more"):
        Graph.of(nodes)


@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/data beside the project")
def test_the_real_trace(tmp_path: Path) -> None:
    with tarfile.open(REAL) as archive:
        file = archive.extractfile("tests/data/chakra.0.et")
        assert file is not None
        trace = _read(tmp_path, file.read())
    profile = trace.known_profile()
    kinds = Counter((o.phase, o.resource) for o in profile.operations)
    # ResNet-50 under DDP: five buckets of its 25.6 million parameters.
    assert profile.gradient_bytes == pytest.approx(102.2e6, rel=0.001)
    assert len(profile.gradients) == len(trace.points) == 5
    assert kinds["forward", "device"] > 400
    assert kinds["backward", "device"] > 500
    assert {phase for phase, _ in kinds} == {"forward", "backward", "finalize", "update"}
    # The device is busy all the time: that long the kernels took.
    assert profile.computation_s == pytest.approx(0.295, abs=0.005)
    ready_s = profile.ready_s()
    assert 0.08 < ready_s[0] < ready_s[-1] < 0.293
    # The second message took 4 % less than the first, which is smaller.
    assert trace.network(2).fit_error < 0.035


# ------------------------------------------------------------------ broken ones


def _with(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    return content.replace(old, new)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (encode(Metadata("0.0.4")), "metadata and no node"),
        (b"hello, this is text", "is broken|truncated|no GlobalMetadata"),
        (chakra_of_ours()[:-5], "truncated"),
        (encode(_node(1)), "the first message is no GlobalMetadata"),
        (_file(_node(1), _node(1)), "node 1 'n1' and node 1 'n1' have the same id"),
        (
            _file(_node(1, NodeType.COMP, 2), _node(2, NodeType.COMP, 1)),
            "a cycle: node 1 'n1' waits",
        ),
        (_file(_node(1, NodeType.COMP, 1)), "a cycle: node 1 'n1' waits for node 1 'n1'"),
        (_file(_node(1)), "no node sums gradients"),
        (_file(_sum(1)), "node 1 'n1' is sent before anything is computed"),
        (_file(_node(1), _sum(2, 1, size=7)), "a gradient of 7 bytes"),
        (_file(_node(1), _sum(2, 1, size=-4)), "a gradient of -4 bytes is not possible"),
        (
            _file(_node(1), _node(2, NodeType.COMM_COLL, 1, comm_type=0)),
            "node 2 'n2' has no integer comm_size",
        ),
        (
            _file(_node(1)._replace(duration_us=1 << 60), _sum(2, 1)),
            "node 1 'n1' takes 1152921504606846976 us, longer than",
        ),
        (
            _with(_file(_node(1), _sum(2, 1)), b"\x18\x07", b"\x18\x63"),
            "node 2 at byte .*: 'n2' has the unknown node type 99",
        ),
    ],
)
def test_errors_name_their_node(content: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=says) as caught:
        _read(tmp_path, content)
    assert "rank.0.et" in str(caught.value)
