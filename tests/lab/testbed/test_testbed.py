"""Real hosts on real links: what they reach, how they are shaped, and that nothing is left."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from syncline.errors import PeerError, UserError
from syncline.lab.processes import reason_of
from syncline.lab.testbed import Cluster, Testbed, kernel
from syncline.lab.testbed.control import Place
from syncline.lab.testbed.sandbox import CONGESTION, CONGESTION_CONTROLS
from tests.timeouts import DEADLINE_S, wait_until
from tests.words import assert_tells

from .machine import alive, descendants, devices, finished, networks

LISTEN = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    connection, peer = server.accept()
    connection.sendall(peer[0].encode())
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=300) as connection:
    print(connection.recv(100).decode())
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-c", code, *arguments]


def asked(server: Place, client: Place) -> str:
    """Return the client's address as the server sees it."""
    reading, writing = os.pipe()
    try:
        with server.start(python(LISTEN), stdout=writing) as listening:
            assert os.read(reading, 100) == b"listening\n"
            answer = client.run(python(ASK, server.name))
            assert listening.wait(DEADLINE_S) == 0
    finally:
        os.close(reading)
        os.close(writing)
    assert answer.stderr == ""
    return answer.stdout.strip()


def shown(place: Place, *command: str) -> Any:
    result = place.run(command)
    assert result.code == 0, result.stderr
    return json.loads(result.stdout)


def test_every_host_reaches_every_other_and_that_is_counted(bed: Testbed) -> None:
    before = bed.traffic()
    assert asked(bed.hosts[0], bed.hosts[2]) == "10.0.0.3"
    after = bed.traffic()
    changed = [new.sent_bytes > old.sent_bytes for old, new in zip(before, after, strict=True)]
    assert changed == [True, False, True]
    assert sum(passed.dropped_packets for passed in after) == 0
    assert asked(bed.hosts[2], bed.hosts[1]) == "10.0.0.2"
    assert asked(bed.hosts[1], bed.hosts[1]) == "10.0.0.2"


def test_there_is_no_way_out(bed: Testbed) -> None:
    for place in (*bed.hosts, bed.switch):
        routes = shown(place, "ip", "-json", "route", "show", "table", "all")
        assert {route["dst"] for route in routes} <= {
            "10.0.0.0/24",
            "10.0.0.255",
            "127.0.0.0/8",
            "127.0.0.1",
            "127.255.255.255",
            "::1",
            *(f"10.0.0.{number}" for number in (1, 2, 3)),
        }
    answer = bed.hosts[0].run(python("import socket; socket.create_connection(('192.0.2.1', 80))"))
    assert "Network is unreachable" in answer.stderr
    assert {link["ifname"] for link in shown(bed.switch, "ip", "-json", "link")} == {
        *("lo", "switch", "port0", "port1", "port2")
    }


def test_links_are_shaped_as_asked_in_both_directions(bed: Testbed) -> None:
    for number, rate in enumerate((125e6, 12.5e6, 125e6)):
        for place, device in ((bed.hosts[number], "eth0"), (bed.switch, f"port{number}")):
            (bucket,) = shown(place, "tc", "-json", "qdisc", "show", "dev", device)
            assert bucket["kind"] == "tbf"
            assert bucket["options"]["rate"] == rate
            # The kernel keeps times, not bytes, and rounds them.
            assert bucket["options"]["burst"] == pytest.approx(
                bed.cluster.burst_bytes(rate), rel=0.01
            )
            (link,) = shown(place, "ip", "-json", "link", "show", "dev", device)
            assert link["mtu"] == 9000


def test_congestion_is_controlled_alike_on_every_machine(bed: Testbed) -> None:
    for host in bed.hosts:
        found = host.run(["cat", str(CONGESTION)])
        assert found.stdout.strip() in CONGESTION_CONTROLS


def test_hosts_are_told_apart_and_share_no_memory(bed: Testbed) -> None:
    names = [host.run(["hostname"]).stdout for host in bed.hosts]
    assert names == ["host0\n", "host1\n", "host2\n"]
    assert bed.hosts[0].run(["touch", "/dev/shm/here"]).code == 0
    assert bed.hosts[0].run(["ls", "/dev/shm"]).stdout == "here\n"
    assert bed.hosts[1].run(["ls", "/dev/shm"]).stdout == ""
    assert set(bed.hosts[1].run(["ls", "/sys/class/net"]).stdout.split()) == {"lo", "eth0"}
    assert not Path("/dev/shm/here").exists()


def test_commands_have_their_hosts_share_of_the_processors(bed: Testbed) -> None:
    here = sorted(os.sched_getaffinity(0))
    shares = [here, *(bed.cluster.processors_of(number, here) for number in range(3))]
    for place, share in zip((bed.switch, *bed.hosts), shares, strict=True):
        assert shown(place, *python("import os; print(sorted(os.sched_getaffinity(0)))")) == share


def test_commands_have_input_output_folder_and_environment(bed: Testbed) -> None:
    host = bed.hosts[0]
    assert host.run(["cat"], text="däta").stdout == "däta"
    assert host.run(["pwd"]).stdout.strip() == str(Path.cwd())
    assert host.run(["sh", "-c", "echo $A"], environment={"A": "b"}).stdout == "b\n"
    failed = host.run(["sh", "-c", "echo no >&2; exit 7"])
    assert (failed.code, failed.stdout, failed.stderr) == (7, "", "no\n")
    assert host.run(["sh", "-c", "kill -9 $$"]).code == -signal.SIGKILL


def test_a_folder_of_path_that_may_not_be_read(bed: Testbed, tmp_path: Path) -> None:
    """As in a shell: whoever may not look into a folder of PATH finds nothing there."""
    locked, unfit = tmp_path / "locked", tmp_path / "unfit"
    locked.mkdir(mode=0)
    unfit.write_text("")
    search = {"PATH": f"{locked}:{os.environ['PATH']}"}
    with pytest.raises(UserError, match="'no-such' on host0 cannot be run: No such file or dir"):
        bed.hosts[0].run(["no-such"], environment=search)
    assert bed.hosts[0].run(["true"]).code == 0
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # root may read everything
    assert reason_of(denied, "no-such", search) == "No such file or directory"
    found = {"PATH": f"{locked}:{tmp_path}"}
    assert reason_of(denied, "unfit", found) == "Permission denied"
    assert reason_of(denied, f"{locked}/no-such", search) == "Permission denied"


def test_a_command_that_takes_too_long_is_killed(bed: Testbed) -> None:
    before = descendants(os.getpid())
    with pytest.raises(PeerError, match=r"'sleep' on host0 did not end within 0.05 s and was kil"):
        bed.hosts[0].run(["sleep", "1000"], timeout_s=0.05)
    wait_until(lambda: not descendants(os.getpid()) - before, "the end of the command")


def test_signals_reach_what_a_command_has_started(bed: Testbed) -> None:
    reading, writing = os.pipe()
    code = "sh -c 'trap \"echo told; exit 0\" USR1; echo ready; while :; do sleep 0.02; done'; :"
    with bed.hosts[0].start(["sh", "-c", f"trap : USR1; {code}"], stdout=writing) as process:
        os.close(writing)
        assert os.read(reading, 100) == b"ready\n"
        process.send_signal(signal.SIGUSR1)
        assert os.read(reading, 100) == b"told\n"
        assert process.wait(DEADLINE_S) == 0
    os.close(reading)


def connections(host: Place) -> list[int]:
    """Return how many TCP connections a host has begun, taken and refused so far.

    Its traffic would not do: the kernel looks for a neighbour again whenever it likes.
    """
    result = host.run(["cat", "/proc/net/snmp"])
    names, counts = (line.split() for line in result.stdout.splitlines() if line[:4] == "Tcp:")
    tcp = dict(zip(names, counts, strict=True))
    return [int(tcp[name]) for name in ("ActiveOpens", "PassiveOpens", "OutRsts")]


def test_two_clusters_do_not_meet(bed: Testbed) -> None:
    with Testbed(Cluster.of(hosts=2, rate="10gbit")) as other:
        before = [connections(host) for host in bed.hosts]
        assert asked(other.hosts[0], other.hosts[1]) == "10.0.0.2"
        assert [connections(host) for host in bed.hosts] == before
        (bucket,) = shown(other.hosts[0], "tc", "-json", "qdisc", "show", "dev", "eth0")
        assert bucket["options"]["rate"] == 1.25e9
    assert asked(bed.hosts[0], bed.hosts[1]) == "10.0.0.2"


def test_nothing_is_left_and_nothing_is_seen_from_outside(namespaces: None) -> None:
    before = devices(), descendants(os.getpid())
    with Testbed(Cluster(hosts=2)) as bed:
        assert devices() == before[0]
        # A daemon: not a child of the command, in a session of its own.
        bed.hosts[0].run(["sh", "-c", "setsid sleep 1000 & exit 0"])
        started = descendants(os.getpid()) - before[1]
        ours = networks(number for number, _ in started)
        assert len(ours) == 2  # the switch's, and that of the host with the daemon
    assert not any(map(alive, started))
    wait_until(lambda: not ours & networks(), "the end of both")  # others may reuse a number
    assert devices() == before[0]


def test_an_error_inside_ends_the_cluster_too(namespaces: None) -> None:
    before = descendants(os.getpid())
    with contextlib.suppress(ZeroDivisionError), Testbed(Cluster(hosts=1)) as bed:
        bed.hosts[0].start(["sleep", "1000"])
        raise ZeroDivisionError
    assert descendants(os.getpid()) <= before


@pytest.mark.parametrize("which", [0, 1], ids=["the launcher", "process 1"])
def test_a_cluster_that_is_killed_from_outside_says_so(namespaces: None, which: int) -> None:
    before = descendants(os.getpid())
    with Testbed(Cluster(hosts=1)) as bed, bed.hosts[0].start(["sleep", "1000"]) as process:
        started = sorted(descendants(os.getpid()) - before)
        os.kill(started[which][0], signal.SIGKILL)
        with pytest.raises(PeerError, match="'sleep' on host0 was lost: the emulated cluster was "):
            process.wait(DEADLINE_S)
        with pytest.raises(PeerError, match="was lost"):
            bed.hosts[0].run(["true"])
    wait_until(lambda: not any(map(alive, started)), "the end of all processes")


def test_latency_where_the_kernel_has_it_and_an_error_where_not(namespaces: None) -> None:
    cluster = Cluster.of(hosts=2, rate="1gbit", latency="200us")
    with Testbed(Cluster(hosts=1)) as bed:
        known = bed.hosts[0].run(["tc", "qdisc", "add", "dev", "lo", "root", "netem"]).code == 0
    if not known:
        with pytest.raises(UserError, match="latency needs netem, which delays packets and which"):
            Testbed(cluster).__enter__()
        return
    with Testbed(cluster) as bed:
        found = shown(bed.hosts[0], "tc", "-json", "qdisc", "show", "dev", "eth0")
        assert [qdisc["kind"] for qdisc in found] == ["tbf", "netem"]
        assert found[1]["options"]["delay"]["delay"] == pytest.approx(200e-6)
        assert asked(bed.hosts[0], bed.hosts[1]) == "10.0.0.2"


# ------------------------------------------------------------------ what the machine lacks

WITHOUT_ROOT = """
from syncline.lab.testbed import Cluster, Testbed
with Testbed(Cluster.of(hosts=2, rate="1gbit")) as bed:
    print(bed.hosts[1].run(["hostname"]).stdout, end="")
    print(bed.run(["sh", "-c", "id -u"], timeout_s=300).stdout)
"""


def without_capabilities(*kept: str) -> list[str]:
    dropped = ",".join(["-all", *(f"+{name}" for name in kept)])
    return ["setpriv", f"--bounding-set={dropped}", "--inh-caps=-all"]


def test_without_root_in_a_user_namespace(namespaces: None) -> None:
    # As root: root without its powers, but for the one that naming root in a namespace takes.
    drop = without_capabilities("setfcap") if os.geteuid() == 0 else []
    refused = finished(*drop, "unshare", "-Ur", "true")
    if refused.returncode:
        pytest.skip(f"no user namespaces here: {refused.stderr.strip()}")
    result = finished(*drop, sys.executable, "-P", "-c", WITHOUT_ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "host1\n('0\\n', '0\\n')\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up what user namespaces take")
def test_without_root_and_without_user_namespaces() -> None:
    result = finished(*without_capabilities(), sys.executable, "-P", "-c", WITHOUT_ROOT)
    said = result.stderr.splitlines()[-1]
    assert_tells(said, "UserError: ", "root", "a user namespace: Operation not permitted", "sudo")


def test_settings_that_keep_user_namespaces_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"kernel.apparmor_restrict_unprivileged_userns": "1"}
    monkeypatch.setattr(kernel, "setting", values.get)
    said = kernel.refusal("namespaces", 1, "Operation not permitted", rootless=True)
    setting = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    assert_tells(said, "namespaces", "Operation not permitted", "sudo", setting)


def test_no_iproute2_and_no_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernel, "SYSTEM_FOLDERS", str(tmp_path))
    with pytest.raises(UserError, match="needs ip and tc of iproute2, not found on this machine"):
        Testbed(Cluster(hosts=1)).__enter__()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="an emulated cluster needs Linux, this is darwin"):
        Testbed(Cluster(hosts=1)).__enter__()
