"""Chakra traces: ours come back as they were, others with inferred phases."""

from __future__ import annotations

import io
import itertools
import tarfile
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import FileError, UserError
from syncline.files.traces import chakra_nodes
from syncline.files.traces.chakra import Graph, read_chakra, write_chakra
from syncline.files.traces.chakra_nodes import CollectiveType, Metadata, Node, NodeType, encode
from syncline.files.traces.trace import Trace
from syncline.plan.network import PRESETS
from syncline.plan.profile import Operation, Profile, Resource
from tests.files.traces.seeds import chakra_of_ours, chakra_of_pytorch, layered_profile, written
from tests.strategies import many, profiles
from tests.trace_files import TRACES

REAL = TRACES.parent / "et" / "chakra_feeder_trace.tar.gz"
NETWORK = PRESETS["10gbe-k80"]
change = msgspec.structs.replace


def read(tmp_path: Path, content: bytes) -> Trace:
    return read_chakra(written(tmp_path, content, "rank.0.et"))


def nodes_of(content: bytes) -> list[Node]:
    attributes = ("is_cpu_op", "comm_type", "comm_size")
    metadata, *nodes = chakra_nodes.read_nodes(io.BytesIO(content), attributes)
    assert metadata.version == "0.0.4"
    return nodes


def node(
    node_id: int,
    kind: NodeType = NodeType.COMP,
    *data: int,
    name: str = "",
    control: tuple[int, ...] = (),
    **about: int,
) -> Node:
    dependencies = array("Q", data), array("Q", control)
    return Node(node_id, name or f"n{node_id}", kind, *dependencies, 10, about)


def total(node_id: int, *data: int, size: int = 400, **about: int) -> Node:
    sums = {"comm_type": CollectiveType.ALL_REDUCE, "comm_size": size}
    return node(node_id, NodeType.COMM_COLL, *data, **sums, **about)


def file_of(*nodes: Node) -> bytes:
    return encode(Metadata("0.0.4")) + b"".join(map(encode, nodes))


@given(profiles())
@many
def test_our_own_come_back(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    """Operations of every resource, too."""
    resources = itertools.cycle(get_args(Resource))
    operations = tuple(
        change(operation, resource=resource)
        for operation, resource in zip(profile.operations, resources, strict=False)
    )
    profile = change(profile, baseline=None, operations=operations)
    made = write_chakra(profile, NETWORK)
    assert made.lost == ()
    assert chakra_nodes.is_metadata(made.content)
    trace = read(tmp_path_factory.getbasetemp(), made.content)
    assert trace.profile == profile
    assert trace.workers == 16
    assert Profile.from_json(profile.to_json()) == profile


def test_what_is_lost_is_said() -> None:
    (lost,) = write_chakra(layered_profile()).lost
    assert lost.startswith("the time of communication:")


def test_a_feeder_finds_what_it_asks_for() -> None:
    """ASTRA-sim reads duration, type, bytes and ``is_cpu_op``, and needs an acyclic graph."""
    known: set[int] = set()
    last: dict[int, list[int]] = {0: [], 1: []}
    sent = 0
    for each in nodes_of(chakra_of_ours()):
        assert each.id not in known
        assert known.issuperset([*each.data_deps, *each.ctrl_deps])
        known.add(each.id)
        if each.type == NodeType.COMM_COLL:
            assert each.attributes["comm_type"] == CollectiveType.ALL_REDUCE
            seconds = NETWORK.all_reduce.seconds(each.integer("comm_size"))
            assert each.duration_us == round(seconds * 1e6)
            sent += 1
        else:
            assert each.type == NodeType.COMP
            lane = each.integer("is_cpu_op")
            assert list(each.ctrl_deps) == last[lane]
            last[lane] = [each.id]
    assert sent == len(layered_profile().gradients)


def test_update_waits_for_all_messages() -> None:
    profile = layered_profile()
    update = Operation(name="update", phase="update", duration_s=1e-3, after=(0,))
    profile = change(profile, operations=(*profile.operations, update))
    nodes = nodes_of(write_chakra(profile).content)
    messages = {n.id for n in nodes if n.type == NodeType.COMM_COLL}
    assert messages < set(nodes[-1].data_deps)


def test_another_form_of_ours_is_refused(tmp_path: Path) -> None:
    content = encode(Metadata("0.0.4", {"syncline": 9})) + encode(node(1))
    with pytest.raises(FileError, match=r"expected form 1 .* the file has 9"):
        read(tmp_path, content)


def test_launches_and_kernels(tmp_path: Path) -> None:
    trace = read(tmp_path, chakra_of_pytorch())
    profile = trace.known_profile()
    # Each message is launched by the host, and stands for the event that it waits for.
    phases = ("forward", *("backward",) * 4, "update")
    pairs = [(phase, resource) for phase in phases for resource in ("host", "device")]
    assert [(o.phase, o.resource) for o in profile.operations] == pairs
    assert [g.size_bytes for g in profile.gradients] == [8196, 16392]
    # 30 us of launching, then the kernels that were given to the stream before the event.
    assert profile.ready_ns() == [2_730_000, 3_230_000]
    assert [p.size_bytes for p in trace.points] == [8196, 16392]
    assert [p.time_s for p in trace.points] == pytest.approx([700e-6, 1400e-6])
    assert "1 messages of kind BROADCAST are left out" in trace.notes
    assert any("dependencies are on nodes that the file does not hold" in n for n in trace.notes)


def test_data_loading_and_copying_are_recognised_by_name_and_type(tmp_path: Path) -> None:
    nodes = (
        node(1, name="DataLoader.next"),
        node(2, NodeType.MEM_LOAD, 1),
        node(3, NodeType.COMP, 2),
        node(4, NodeType.COMP, 3, name="COMP_NODE_conv1_BWD_WG"),
        total(5, 4),
        node(6, NodeType.COMP, 5, name="Optimizer.step"),
        node(7, NodeType.COMP, 5, name="copy back"),
    )
    profile = read(tmp_path, file_of(*nodes)).known_profile()
    phases = ["data", "copy", "forward", "backward", "update", "finalize"]
    assert [o.phase for o in profile.operations] == phases
    assert profile.gradients[0].ready_after == 3


def test_what_lies_between_is_passed_through(tmp_path: Path) -> None:
    between = node(2, NodeType.METADATA, 1), node(3, NodeType.COMM_SEND, 2)
    trace = read(tmp_path, file_of(node(1, name="wgrad"), *between, total(4, 3, size=6)))
    (gradient,) = trace.known_profile().gradients
    assert (gradient.elements, gradient.dtype, gradient.ready_after) == (3, "float16", 0)
    assert "1 messages of kind COMM_SEND are left out" in trace.notes
    with pytest.raises(UserError, match="messages of 1 different sizes"):
        trace.network(4)


def test_control_dependencies_order_nodes_if_they_have_no_cycle(tmp_path: Path) -> None:
    late = node(1, control=(2,))
    trace = read(tmp_path, file_of(late, node(2), total(3, 1)))
    operations = trace.known_profile().operations
    assert [(o.name, o.after) for o in operations] == [("n2", ()), ("n1", (0,))]
    trace = read(tmp_path, file_of(late, node(2, NodeType.COMP, 1), total(3, 2)))
    assert "the control dependencies have cycles and were not used" in trace.notes
    assert [o.name for o in trace.known_profile().operations] == ["n1", "n2"]


def test_a_long_chain_is_no_recursion() -> None:
    nodes = [node(i, NodeType.COMP, *([i - 1] if i else [])) for i in range(3000)]
    assert Graph.of(nodes[::-1]).nodes == nodes
    nodes[0] = node(0, NodeType.COMP, 2999)
    with pytest.raises(UserError, match=r"the data dependencies have a cycle: .* 2996 more"):
        Graph.of(nodes)


@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/data beside the project")
def test_the_real_trace(tmp_path: Path) -> None:
    with tarfile.open(REAL) as archive:
        trace = read(tmp_path, archive.extractfile("tests/data/chakra.0.et").read())
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


UNKNOWN_TYPE = file_of(node(1), total(2, 1)).replace(b"\x18\x07", b"\x18\x63")
CIRCLE = file_of(node(1, NodeType.COMP, 2), node(2, NodeType.COMP, 1))
UNSIZED = node(2, NodeType.COMM_COLL, 1, comm_type=0)
LONG = node(1)._replace(duration_us=1 << 60)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (encode(Metadata("0.0.4")), "metadata and no node"),
        (b"hello, this is text", "is broken|truncated|no GlobalMetadata"),
        (chakra_of_ours()[:-5], "truncated"),
        (encode(node(1)), "the first message is no GlobalMetadata"),
        (file_of(node(1), node(1)), "node 1 'n1' and node 1 'n1' have the same id"),
        (CIRCLE, "a cycle: node 1 'n1' waits"),
        (file_of(node(1, NodeType.COMP, 1)), "a cycle: node 1 'n1' waits for node 1 'n1'"),
        (file_of(node(1)), "no node sums gradients"),
        (file_of(total(1)), "node 1 'n1' is sent before anything is computed"),
        (file_of(node(1), total(2, 1, size=7)), "a gradient of 7 bytes"),
        (file_of(node(1), total(2, 1, size=-4)), "a gradient of -4 bytes is not possible"),
        (file_of(node(1), UNSIZED), "node 2 'n2' has no integer comm_size"),
        (file_of(LONG, total(2, 1)), "node 1 'n1' takes 1152921504606846976 us, longer than"),
        (UNKNOWN_TYPE, "node 2 at byte .*: 'n2' has the unknown node type 99"),
    ],
)
def test_errors_name_their_node(content: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=says) as caught:
        read(tmp_path, content)
    assert "rank.0.et" in str(caught.value)


# Nodes as protocol buffers: compared with another declaration of the schema; broken ones

UINT64, INT64, STRING, BOOL, DOUBLE, MESSAGE, SINT64, FIXED32 = 4, 3, 9, 8, 1, 11, 18, 7
OPTIONAL, REPEATED = 1, 3
FIELDS: dict[str, dict[str, tuple[int, int]]] = {
    "Attribute": {
        "name": (1, STRING),
        "double_val": (3, DOUBLE),
        "int64_val": (9, INT64),
        "uint64_val": (13, UINT64),
        "sint64_val": (17, SINT64),
        "fixed32_val": (19, FIXED32),
        "bool_val": (27, BOOL),
        "string_val": (29, STRING),
    },
    "Metadata": {"version": (1, STRING), "attr": (2, MESSAGE)},
    "Node": {
        "id": (1, UINT64),
        "name": (2, STRING),
        "type": (3, UINT64),
        "ctrl_deps": (4, UINT64),
        "data_deps": (5, UINT64),
        "duration_micros": (7, UINT64),
        "attr": (10, MESSAGE),
    },
}  # numbers and types of the fields of Chakra's messages
LISTS = ("attr", "ctrl_deps", "data_deps")


def _schema() -> dict[str, Any]:
    """Return message classes with the fields of Chakra's schema."""
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="t", syntax="proto3")
    for name, fields in FIELDS.items():
        made = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            label = REPEATED if field in LISTS else OPTIONAL
            of = ".t.Attribute" if kind == MESSAGE else None
            made.field.add(name=field, number=number, type=kind, label=label, type_name=of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"t.{name}") for name in FIELDS}
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


SCHEMA = _schema()


@pytest.mark.parametrize("content", [chakra_of_ours(), chakra_of_pytorch()])
def test_others_read_what_we_write(content: bytes) -> None:
    first, *others = (m for _, m in chakra_nodes.messages(io.BytesIO(content)))
    metadata = SCHEMA["Metadata"].FromString(first)
    theirs = [SCHEMA["Node"].FromString(message) for message in others]
    attributes = sorted({a.name for node in theirs for a in node.attr})
    ours, *nodes = chakra_nodes.read_nodes(io.BytesIO(content), attributes)
    assert ours.version == metadata.version
    assert set(ours.attributes) == {a.name for a in metadata.attr}
    for node, their in zip(nodes, theirs, strict=True):
        assert (node.id, node.name, node.type) == (their.id, their.name, their.type)
        assert list(node.data_deps) == list(their.data_deps)
        assert list(node.ctrl_deps) == list(their.ctrl_deps)
        assert node.duration_us == their.duration_micros
        assert node.attributes == {a.name: value_of(a) for a in their.attr}


def value_of(attribute: Any) -> object:
    if attribute.name == "is_cpu_op":
        return int(attribute.bool_val)
    if attribute.name == "syncline.duration_s":
        return attribute.double_val
    return attribute.string_val or attribute.int64_val


values = st.one_of(
    st.tuples(st.just("double_val"), st.floats(allow_nan=False)),
    st.tuples(st.just("int64_val"), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.tuples(st.just("uint64_val"), st.integers(0, (1 << 64) - 1)),
    st.tuples(st.just("sint64_val"), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.tuples(st.just("fixed32_val"), st.integers(0, (1 << 32) - 1)),
    st.tuples(st.just("string_val"), st.text()),
).filter(lambda pair: bool(pair[1]))  # proto3 leaves out what is zero


uint64 = st.integers(0, (1 << 64) - 1)


@given(
    st.tuples(uint64, st.text(), st.sampled_from(NodeType), uint64),
    st.lists(uint64),
    st.dictionaries(st.text(min_size=1), values, max_size=4),
)
@many
def test_we_read_what_others_write(
    own: tuple[int, str, NodeType, int],
    dependencies: list[int],
    attributes: dict[str, tuple[str, object]],
) -> None:
    node = SCHEMA["Node"](
        **dict(zip(("id", "name", "type", "duration_micros"), own, strict=True)),
        data_deps=dependencies,
        attr=[SCHEMA["Attribute"](**{"name": key, f: v}) for key, (f, v) in attributes.items()],
    )
    content = encode(Metadata("0.0.4")) + chakra_nodes.delimited(node.SerializeToString())
    assert chakra_nodes.is_metadata(content)
    _, ours = chakra_nodes.read_nodes(io.BytesIO(content), list(attributes))
    assert (ours.id, ours.name, ours.type, ours.duration_us) == own
    assert list(ours.data_deps) == dependencies
    assert ours.attributes == {key: value for key, (_, value) in attributes.items()}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\x08", "the message is broken"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "the message is broken"),
        (b"\x00\x01", "the message is broken"),
        (b"\x12\x05ab", "the message is broken"),
        (b"\x09abc", "the message is broken"),
        (b"\x0f", "the message is broken"),
        (b"\x0a\x02ab", "field 1 is of wire type 2"),
        (b"\x2d\x01\x00\x00\x00", "field 5 is of wire type 5"),
        (b"\x18\x63", "'' has the unknown node type 99"),
    ],
)
def test_a_broken_node_is_refused(message: bytes, says: str) -> None:
    metadata = encode(Metadata("0.0.4"))
    content = metadata + chakra_nodes.delimited(message)
    at = len(metadata) + 1
    with pytest.raises(UserError, match=f"^node 1 at byte {at}: .*{says}"):
        list(chakra_nodes.read_nodes(io.BytesIO(content), ()))


def test_broken_text_is_shown_as_such() -> None:
    content = encode(Metadata("0.0.4")) + chakra_nodes.delimited(b"\x12\x02a\xff\x18\x04")
    _, node = chakra_nodes.read_nodes(io.BytesIO(content), ())
    assert node.name == "a\ufffd"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x05abc", "ends within the message that begins at byte 0, it is truncated"),
        (b"\x01a\x80", "ends within the message that begins at byte 2"),
        (b"\xff\xff\xff\xff\xff\x01", "byte 0: the length of a message is broken"),
        (b"\xff\xff\xff\xff\x07", "a message of 2147483647 bytes; at most"),
    ],
)
def test_a_broken_sequence_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        list(chakra_nodes.messages(io.BytesIO(content)))
