"""PipeDream's graphs are read with their branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import FileError
from syncline.files.traces.pipedream import is_pipedream, read_pipedream
from syncline.plan.profile import Profile
from tests.files.traces.seeds import PIPEDREAM
from tests.trace_files import PIPEDREAM as REAL
from tests.trace_files import TRACES


def _read(tmp_path: Path, text: str) -> Profile:
    path = tmp_path / "net.graph.txt"
    path.write_text(text)
    return read_pipedream(path).known_profile()


def test_branches_are_kept_in_both_directions(tmp_path: Path) -> None:
    profile = _read(tmp_path, PIPEDREAM)
    assert profile.model == "net"
    forward = [(o.phase, o.after) for o in profile.operations[:5]]
    assert forward == [
        ("data", ()),
        ("forward", (0,)),
        ("forward", (1,)),
        ("forward", (1,)),
        ("forward", (2, 3)),
    ]
    # Backward: node5, node4, node3, node2; each after its own forward and those that read it.
    assert [o.after for o in profile.operations[5:]] == [(4,), (3, 5), (2, 5), (1, 6, 7)]
    assert profile.phase_s("data") == pytest.approx(6.5e-3)
    assert [(g.name, g.elements, g.ready_after, g.needed_by) for g in profile.gradients] == [
        ("node4 Conv2d", 307, 6, 3),
        ("node2 Conv2d", 23296, 8, 1),
    ]


def test_operations_run_in_the_order_in_which_they_were_traced(tmp_path: Path) -> None:
    lines = PIPEDREAM.splitlines()
    shuffled = "\n".join([lines[3], lines[0], lines[4], lines[2], lines[1], *reversed(lines[5:])])
    assert _read(tmp_path, shuffled) == _read(tmp_path, PIPEDREAM)


def test_a_second_root_is_no_data_loading(tmp_path: Path) -> None:
    text = PIPEDREAM.replace("\tnode1 -- node2\n", "")
    phases = [o.phase for o in _read(tmp_path, text).operations[:3]]
    assert phases == ["data", "forward", "forward"]


@pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/data beside the project")
@pytest.mark.parametrize("name", REAL)
def test_real_graphs(name: str) -> None:
    profile = read_pipedream(TRACES / "pipedream" / f"{name}.graph.txt").known_profile()
    megabytes = {"alexnet": 244.4, "densenet121": 31.9}[name]
    assert profile.gradient_bytes / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert profile.phase_s("data") > 0.005
    assert len({g.needed_by for g in profile.gradients}) == len(profile.gradients)


def test_a_graph_is_known_by_its_first_node() -> None:
    assert is_pipedream(PIPEDREAM)
    assert not is_pipedream("node1 -- node2\n")
    assert not is_pipedream("")


NODE = "nodeX -- ReLU -- forward_compute_time=1, backward_compute_time=1, parameter_size=4\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PIPEDREAM + "\tnode4 -- node2\n", "the edges have a cycle, through node2, node"),
        (PIPEDREAM + "\tnode4 -- node4\n", "the edges have a cycle, through node4"),
        (PIPEDREAM + "\tnode4 -- node9\n", "line 11: an edge of 'node9', which is not a node"),
        (PIPEDREAM + "\tnode4 node5\n", "line 11: expected an edge"),
        (PIPEDREAM + NODE.replace("nodeX", "node3"), "line 11: 'node3' comes twice"),
        (PIPEDREAM.replace("forward_compute_time=22.3, ", ""), "line 2: expected 'node"),
        (PIPEDREAM.replace("backward_compute_time=6.4, ", ""), "line 2: backward_compute_time is"),
        (PIPEDREAM.replace("93184.000", "-4"), "line 2: parameter_size must be finite"),
        (PIPEDREAM.replace("22.3", "abc"), "line 2: expected a number as forward_compute_time"),
        (PIPEDREAM.replace("22.3", "1e99"), "line 2: forward_compute_time is 1e.96 s, longer"),
        (PIPEDREAM.replace("93184.000", "1e99"), "parameter_size is 1e99, which is not possible"),
        ("\tnode1 -- node2\n", "no node; expected lines such as"),
        (PIPEDREAM.split("\n")[0], "no gradient tensors"),
        ("hello\n", "line 1: expected 'node -- operation"),
    ],
)
def test_errors_name_their_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=says) as caught:
        _read(tmp_path, text)
    assert "net.graph.txt" in str(caught.value)


def test_a_long_chain_is_no_recursion(tmp_path: Path) -> None:
    nodes = "".join(NODE.replace("nodeX", f"node{i}") for i in range(3000))
    edges = "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(2999))
    assert len(_read(tmp_path, nodes + edges).operations) == 6000
