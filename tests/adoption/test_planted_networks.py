"""``syncline advise`` names what is wrong with a network in which something was planted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from syncline.lab.testbed import Cluster, Testbed
from syncline.plan.advice import Advice
from tests.lab.testbed.machine import require_namespaces
from tests.timeouts import JOB_DEADLINE_S

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        time.sleep(0.02 * (dist.get_rank() == int(sys.argv[1])))
        return torch.tanh(super().forward(x))

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[Layer(99, 99) for _ in range(8)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(64, 99)).square().mean().backward()
    optimizer.step()
"""
NOBODY = "-1"
SWITCH = -1
TINY_BUFFER = "tc qdisc replace dev port1 root tbf rate 100mbit burst 20kb limit 24kb"
SMALL_MTU = "ip link set dev eth0 mtu 1500"
SLOW_SENDER = "tc qdisc replace dev eth0 root tbf rate 50mbit burst 20kb limit 1mb"
FASTER_INTERFACE = """
ip link add fast0 type veth peer name fast1
ip link set dev fast0 up
ip link set dev fast1 up
echo 1000 >speed  # Mbit/s; the kernel says 10,000 of all of them
mount --bind speed /sys/class/net/eth0/speed
"""
MISSET = (
    "the MTU differs between hosts: 1500, 9000 bytes",
    "host0 (rank 0) sends through eth0, and fast",
    "one TCP stream may not fill it",
)
LOSSY = ("the network loses packets", "slow link? 1 MiB from host0 to host1", "the MTU is 1500")
SLOW = ("slow host? 1 MiB to or from host2", "slow host? host0 (rank 0) computes")
ONE_WAY = ("slow link? 1 MiB from host1 to host2",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "planted", "slow_rank", "named"),
    [
        (Cluster.of(hosts=2, rate="100mbit"), {0: FASTER_INTERFACE, 1: SMALL_MTU}, NOBODY, MISSET),
        (Cluster.of(hosts=2, rate="1gbit", mtu_bytes=1500), {SWITCH: TINY_BUFFER}, NOBODY, LOSSY),
        (Cluster.of(hosts=4, rate="500mbit", hosts_rate=["2:50mbit"]), {}, "0", SLOW),
        (Cluster.of(hosts=3, rate="500mbit"), {1: SLOW_SENDER}, NOBODY, ONE_WAY),
    ],
    ids=["interfaces", "losses", "slow hosts", "one way"],
)
def test_what_was_planted_is_named(
    cluster: Cluster, planted: dict[int, str], slow_rank: str, named: Sequence[str], tmp_path: Path
) -> None:
    require_namespaces()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "syncline.advise", "-o", str(tmp_path), str(script), slow_rank]
    with Testbed(cluster) as bed:
        for host, text in planted.items():
            place = bed.switch if host == SWITCH else bed.hosts[host]
            done = place.run(["sh", "-ec", f"cd {tmp_path}\n{text}"])
            assert done.code == 0, done.stderr
        result = bed.run(command, timeout_s=JOB_DEADLINE_S)
        assert min(passed.sent_bytes for passed in bed.traffic()) > 200_000
    assert result.exit_code == 0, result.stderr
    suspects = Advice.load(tmp_path / "advice.json").suspects
    assert [text for text in named if not any(text in suspect for suspect in suspects)] == []
    guessed = [s for s in suspects if "1 MiB" in s and not any(text in s for text in named)]
    assert guessed == []
