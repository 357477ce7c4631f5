"""Small valid files of every trace format, as starting points for tests and for fuzzing."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from reproduce.inputs import TABLE_VI

from syncline.files.traces.chakra import write_chakra
from syncline.files.traces.chakra_nodes import CollectiveType, Metadata, Node, NodeType, encode
from syncline.files.traces.layer_table import write_layer_table
from syncline.files.traces.layers import Layer, profile_of
from syncline.plan.network import PRESETS
from syncline.plan.profile import Profile
from tests.files.traces.kineto_seeds import execution_trace, kineto, kineto_array, kineto_of_host

ASTRASIM = """\
DATA
3
conv1	-1	1300	NONE	0	1200	NONE	0	3200	ALLREDUCE	37632	320
conv2	-1	3456	NONE	0	3648	NONE	0	7488	ALLREDUCE	65536	749
relu	-1	345	NONE	0	364	NONE	0	0	NONE	0	0
"""

PIPEDREAM = """\
node1 -- Input -- forward_compute_time=6.5, backward_compute_time=0.0, \
activation_size=1540.0, parameter_size=0.000
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=22.3, \
backward_compute_time=6.4, activation_size=1982.0, parameter_size=93184.000
node3 -- ReLU() -- forward_compute_time=0.8, backward_compute_time=0.7, \
activation_size=1982.0, parameter_size=0.000
node4 -- Conv2d(3, 8) -- forward_compute_time=3.1, backward_compute_time=5.6, \
activation_size=1433.0, parameter_size=1229.568
node5 -- Add -- forward_compute_time=0.1, backward_compute_time=0.1, \
activation_size=[1433.0; 3.0], parameter_size=0.000
	node1 -- node2
	node2 -- node3
	node2 -- node4
	node3 -- node5
	node4 -- node5
"""


def written(folder: Path, content: Any, name: str = "trace") -> Path:
    """Return a file of this text, or of these bytes, or of this in JSON."""
    path = folder / name
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def layered_profile() -> Profile:
    layers = [
        Layer(name="conv", forward_s=1e-3, weight_s=2e-3, gradient_bytes=4000),
        Layer(name="relu", forward_s=1e-4, weight_s=2e-4),
        Layer(name="fc", forward_s=5e-4, weight_s=1e-3, gradient_bytes=80_000),
    ]
    return profile_of(layers, model="three layers", data_s=1e-4)


def chakra_of_ours() -> bytes:
    """Return a Chakra trace as :func:`write_chakra` makes it."""
    return write_chakra(layered_profile(), PRESETS["10gbe-k80"]).content


def chakra_of_pytorch() -> bytes:
    """Return a Chakra trace in the manner of those recorded from PyTorch: launches and kernels."""
    nodes: list[Node] = []
    host, back, device, link = 1, 2, 7, 14  # threads

    def add(name: str, duration_us: int, thread: int, *data: int, **sent: int) -> int:
        own = 10 + len(nodes)
        kind = NodeType.COMM_COLL if sent or name.startswith("c10d") else NodeType.COMP
        about: dict[str, int | float | str] = {"is_cpu_op": int(thread < device), "tid": thread}
        about |= {"rf_id": own, "op_schema": "x", **sent}
        nodes.append(Node(own, name, kind, array("Q", data), array("Q", [3]), duration_us, about))
        return own

    launch = add("aten::conv2d", 30, host)
    kernel = add("conv_kernel(float*)", 900, device, launch)
    conv = add("aten::convolution_backward", 40, back, launch)
    grad = add("wgrad_kernel", 1800, device, conv, kernel)
    sums, shares = {"comm_type": CollectiveType.ALL_REDUCE}, {"comm_type": CollectiveType.BROADCAST}
    sent = add("c10d::allreduce_", 20, back, conv)
    add("ncclKernel_AllReduce(ncclDevComm*)", 700, link, sent, **sums, comm_size=8196)
    more = add("aten::mm", 40, back, conv)
    add("sgemm", 500, device, more, grad)
    sent = add("c10d::allreduce_", 20, back, more)
    add("ncclKernel_AllReduce(ncclDevComm*)", 1400, link, sent, **sums, comm_size=16392)
    add("ncclKernel_Broadcast", 9, link, sent, **shares, comm_size=424)
    step = add("aten::_foreach_add_", 60, host, sent)
    add("multi_tensor_apply_kernel", 300, device, step)
    metadata = Metadata("", {"schema": "1.0.1", "pid": 114598, "start_ts": 216405745})
    return encode(metadata) + b"".join(map(encode, nodes))


def seeds() -> dict[str, list[bytes]]:
    """Return valid files by the name of their format."""
    lines = TABLE_VI.splitlines(keepends=True)
    short = "".join(lines[:4])
    return {
        "layer-table": [
            TABLE_VI.encode(),
            (short + "".join(lines[1:4])).encode(),
            short.replace("\t", " ").encode(),
            write_layer_table(layered_profile()).content,
        ],
        "astrasim": [ASTRASIM.encode()],
        "pipedream": [PIPEDREAM.encode()],
        "chakra": [chakra_of_ours(), chakra_of_pytorch()],
        "json": [layered_profile().to_json().encode()],
        "kineto": [kineto(), kineto_of_host(), kineto_array()],
        "execution-trace": [execution_trace()],
    }
