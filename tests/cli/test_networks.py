"""Networks as they are named on the command line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from syncline.cli import networks
from syncline.cli.networks import network_argument, states_workers
from syncline.errors import UserError
from syncline.lab.training.config import TrainingConfig
from syncline.plan.cost import CostCurve
from syncline.plan.exchange import Link, Stage
from syncline.plan.network import PRESETS, Contention, Network
from syncline.plan.recipe import SPARSE_NAMES, Recipe

NETWORK_TOPIC = Path(networks.__file__).with_name("network.txt").read_text()


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    assert network_argument(name) is PRESETS[name]
    assert name in NETWORK_TOPIC


@pytest.mark.parametrize("name", ["bandwidth=1.json", "a=1.json"])
def test_a_file_may_have_the_name_of_a_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    PRESETS["10gbit"].save(path)
    assert network_argument(str(path)) == PRESETS["10gbit"]


def test_lines() -> None:
    line = network_argument("a=9.08e-4, b=7.4e-10,workers=8,algorithm=binary-tree")
    assert line.all_reduce == CostCurve.line(9.08e-4, 7.4e-10)
    assert (line.workers, line.algorithm) == (8, "binary-tree")
    assert network_argument("b=7.4e-10,a=9.08e-4").workers == 16


def test_links() -> None:
    link = Link(alpha_s=2e-5, beta_s_per_byte=8e-10, gamma_s_per_byte=0.0)
    text = "bandwidth=10gbit, latency=20us, workers=64, algorithm=halving-doubling"
    assert network_argument(text) == Network.of_link(
        link, workers=64, algorithm="halving-doubling", name=text
    )
    bare = network_argument("bandwidth=10gbit")
    assert (bare.link, bare.all_reduce) == (PRESETS["10gbit"].link, PRESETS["10gbit"].all_reduce)


def test_sparse_links() -> None:
    """A density alone means the same as to ``syncline train`` and to a recipe."""
    trained = Recipe(density=0.001).algorithm
    assert network_argument("bandwidth=1gbit,density=0.001").algorithm == trained
    for name, algorithm in SPARSE_NAMES.items():
        text = f"bandwidth=1gbit,density=0.001,algorithm={name}"
        assert network_argument(text).algorithm == algorithm
        config = TrainingConfig.of("resnet20", "digits", compression=name, density=0.001)
        full = TrainingConfig.of("resnet20", "digits", compression=algorithm, density=0.001)
        assert config.recipe(1) == full.recipe(1)
        assert config.recipe(1).algorithm == algorithm  # type: ignore[union-attr]
    assert network_argument("bandwidth=1gbit,density=0.001,algorithm=top-k").density == 0.001


def test_hosts() -> None:
    network = network_argument("bandwidth=10gbit,hosts=4x8")
    assert (network.workers, network.hosts) == (32, 4)
    assert network.inside == Link(alpha_s=5e-6, beta_s_per_byte=1 / 12e9, gamma_s_per_byte=0.0)
    assert "12GB/s" in NETWORK_TOPIC
    assert "5us" in NETWORK_TOPIC
    given = network_argument("bandwidth=10gbit,hosts=4x8,inside-bandwidth=1GB/s,inside-latency=1ms")
    assert given.inside == Link(alpha_s=1e-3, beta_s_per_byte=1e-9, gamma_s_per_byte=0.0)
    for workers in (31, 32):  # the last host may have fewer
        network = network_argument(f"bandwidth=10gbit,hosts=4x8,workers={workers}")
        assert (network.workers, network.hosts) == (workers, 4)


def test_servers_and_stages() -> None:
    served = network_argument("bandwidth=10gbit,algorithm=parameter-server,servers=4,hosts=4x8")
    assert (served.servers, served.hosts) == (4, 4)
    text = "bandwidth=1gbit,staging=250MB/s,switch=2GB/s"
    both = (Stage(at="host", bytes_per_s=250e6), Stage(at="switch", bytes_per_s=2e9))
    assert network_argument(text).stages == both
    assert network_argument(text, workers=4).stages == network_argument(text).stages


def test_jobs_that_share_the_links() -> None:
    alone, shared = (network_argument(f"bandwidth=10gbit,jobs={jobs}") for jobs in (1, 2))
    assert alone.all_reduce == network_argument("bandwidth=10gbit").all_reduce
    assert shared.jobs == 2
    assert shared.all_reduce == alone.all_reduce  # what the others do to it, the simulator finds
    later = network_argument("10gbit").replace(jobs=2)
    assert (later.jobs, later.name) == (2, "10gbit shared by 2 jobs")
    assert later.replace(workers=4).jobs == 2
    line = network_argument("a=1e-3,b=2e-9,workers=8")
    assert line.replace(jobs=3).all_reduce == line.all_reduce
    with pytest.raises(UserError, match="jobs must be at least 1 and at most 64, found 65"):
        line.replace(jobs=65)


def test_a_measured_push_and_pull() -> None:
    line = network_argument("a=1e-3,b=2e-9,workers=8,algorithm=parameter-server")
    more = line.replace(workers=16)
    # One server's port passes twice as many messages.
    assert more.all_reduce.seconds(10**6) == pytest.approx(2 * (1e-3 + 2e-3))
    sharded = line.replace(algorithm="sharded-parameter-server")
    assert sharded.all_reduce.seconds(10**6) == pytest.approx(1e-3 + 2e-3 / 8)


def test_points(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(
        "\ufeffsize_bytes,time_s\n# measured today\n1024, 1e-4\n\n1048576;1.2ms # slow\n"
    )
    network = network_argument(f"points={path},workers=8,algorithm=two-tree")
    assert (network.workers, network.algorithm) == (8, "two-tree")
    assert [(p.size_bytes, p.time_s) for p in network.points] == [(1024, 1e-4), (1 << 20, 1.2e-3)]
    path.write_text("1024 1e-4\n1048576\t1.2e-3")
    again = network_argument(f"points={path}, workers=8")
    assert again.all_reduce == network.all_reduce
    assert network_argument(f"points={path},workers=8", workers=16).workers == 16


NCCL_TESTS = """# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor)
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     0.30    0.00    0.00      0     0.28    0.00    0.00      0
        1024           256     float     sum      -1    31.25    0.03    0.06      0    30.10    0.03    0.06      0
     1048576        262144     float     sum      -1    98.50   10.65   18.63      0    97.70   10.73   18.78      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 9.3
"""  # noqa: E501
OSU = """mpirun: 8 processes

# OSU MPI Allreduce Latency Test v7.2
# Size       Avg Latency(us)
1024                  31.25
1048576               98.50
"""


@pytest.mark.parametrize("printed", [NCCL_TESTS, OSU])
def test_points_as_benchmarks_print_them(tmp_path: Path, printed: str) -> None:
    path = tmp_path / "printed.txt"
    path.write_text(printed)
    network = network_argument(f"points={path},workers=8,algorithm=nccl,jobs=2,contention=1.3")
    found = [(p.size_bytes, p.time_s) for p in network.points]
    assert found == [(1024, pytest.approx(31.25e-6)), (1 << 20, pytest.approx(98.5e-6))]
    assert (network.jobs, network.contention) == (2, Contention(computing=1.3, exchange=1.3))


@pytest.mark.parametrize("text", ["10gbit", "a=1e-3,b=1e-9"])
def test_contention_is_said_of_any_network(text: str) -> None:
    network = network_argument(f"{text},contention=1.5,jobs=3,message-cost=50us")
    assert (network.contention.exchange, network.jobs) == (1.5, 3)
    assert network.contention.handling_s(4) == pytest.approx(200e-6)
    with pytest.raises(UserError, match="contention must be at least 1"):
        network_argument(f"{text},contention=0.5")


def test_workers_and_an_algorithm_replace_the_networks_own() -> None:
    assert network_argument("10gbit", workers=64).workers == 64
    assert network_argument("10gbit", algorithm="two-tree").algorithm == "two-tree"
    own = network_argument("bandwidth=10gbit,algorithm=binary-tree", workers=64)
    assert own.algorithm == "binary-tree"


def test_a_bare_rate_is_a_link() -> None:
    for text in ("100mbit", "12.5MB/s", "1e2 Mbps"):
        network = network_argument(text)
        assert network.link == network_argument("bandwidth=100mbit").link
        assert (network.name, network.workers, network.algorithm) == (text, 16, "ring")
        assert network_argument(text, workers=2).workers == 2
        assert not states_workers(text)
    assert network_argument("10gbit,workers=16").all_reduce == PRESETS["10gbit"].all_reduce
    text = "1GB/s,latency=1ms,hosts=2x4"
    network, spelled = network_argument(text), network_argument(f"bandwidth={text}")
    assert network == msgspec.structs.replace(spelled, name=text)
    assert states_workers(text)


UNREAD = ("bandwidth=10gbit", "a=1", "workers", "workers=2.5", "hosts=4", "hosts=0x4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=1e-3", "both a= and b= are needed"),
        *((f"a=1e-3,{part}", f"cannot read '{part}'") for part in ("b=x", "b=nan", "b=1e", "c=1")),
        ("a=1e-3,a=1e-4,b=1", "cannot read 'a=1e-4'"),
        ("a=1e-3,b=1e-9,workers=1e999", "cannot read 'workers=1e999'"),
        ("a=1e-3,b=1e-9,workers=0", "workers must be at least 1"),
        ("a=1e999,b=1e-9", "cost_s must be finite"),
        ("a=-1,b=1e-9", "cost_s must be finite and at least 0"),
        ("a=1,b=1,algorithm=rong", "did you mean 'ring'"),
        ("latency=1us", "expected 'a=SECONDS,b=SECONDS_PER_BYTE[,workers=N]"),
        ("bandwidth=10gb", "could mean bits or bytes"),
        ("bandwidth=10gbit,latency=20", "duration '20' is not a number with a unit"),
        *((f"bandwidth=10gbit,{part}", f"cannot read '{part}'") for part in UNREAD),
        ("bandwidth=10gbit,workers=0", "at least 1"),
        ("bandwidth=10gbit,hosts=4x8,workers=16", "are 32 workers or a few less"),
        ("bandwidth=10gbit,inside-latency=1us", "inside-latency= needs hosts="),
        ("inside-bandwidth=1GB/s,hosts=2x2", "bandwidth= is needed"),
        ("bandwidth=10gbit,algorithm=rong", "did you mean 'ring'"),
        ("bandwidth=10gbit,density=2", "density must be above 0 and at most 1"),
        ("bandwidth=10gbit,density=0.1,algorithm=ring", "ring sends every element"),
        ("bandwidth=10gbit,servers=4", "servers were given, but ring does not count them"),
        ("bandwidth=10gbit,staging=4", "'4' has no unit"),
        ("bandwidth=10gbit,jobs=0", "jobs must be at least 1 and at most 64, found 0"),
        ("100mb", f"is no file, preset ({', '.join(PRESETS)}) or rate: bandwidth '100mb' could "),
        ("100", "or rate: bandwidth '100' has no unit"),
        ("10gbe", "or rate: bandwidth '10gbe' could mean bits or bytes; write bits as 10gbit"),
        ("0mbit", "or rate: bandwidth '0mbit' must be finite and above 0"),
        ("8nodes", "or rate: bandwidth '8nodes' has the unknown unit 'nodes'"),
        ("100mb,workers=2", "bandwidth '100mb' could mean bits or bytes"),
        ("100mbit,bandwidth=1gbit", "cannot read 'bandwidth=1gbit'"),
        ("10gbe-v10", "no network file or preset '10gbe-v10'; did you mean '10gbe-v100'?"),
        ("8nodes.json", "8nodes.json: no such file"),
        ("deep/absent", "deep/absent: no such file"),
        ("n" * 5000, "no network file or preset"),
        ("points=curve.csv", "both points= and workers= are needed"),
        ("curve.csv", "write 'points=curve.csv,workers=N'"),
        ("points=curve.csv,workers=4", "curve.csv: not text"),
        ("points=missing,workers=4", "missing: no such file"),
    ],
)
def test_no_network(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("curve.csv").write_bytes(b"8 1\n\xff 1")
    with pytest.raises(UserError) as error:
        network_argument(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("8 1\n9", "line 2: expected a size in bytes and a time in seconds, found '9'"),
        ("8 1\n9 1 1", "line 2: expected a size in bytes and a time in seconds"),
        ("size,time_us\n8,1\n9,2", "line 1: expected a header such as .*, found 'size,time_us'"),
        ("8 1\nsize_bytes time_s", "line 2: expected a whole number of bytes, found 'size_bytes'"),
        ("8.5 1\n9 1", "line 1: expected a whole number of bytes, found '8.5'"),
        ("8 1\n9 fast", "line 2: duration 'fast' is not a number with a unit"),
        ("8 1\n9 -1", "line 2: expected a time above 0 s, found '-1'"),
        ("8 1\n9 1e999", "line 2: expected a time above 0 s, found '1e999'"),
        ("8 1\n9 1e9", "line 2: the time is 1e.09 s, longer than"),
        ("8 1\n8 2", "at least two sizes"),
        ("8 1\n9999999999999999999 2", "points.1.: a measured point of 9999999999999999999 bytes"),
        ("", "at least two sizes"),
    ],
)
def test_what_is_no_file_of_points(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "curve.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"curve\.txt.*{message}"):
        network_argument(f"points={path},workers=4")
