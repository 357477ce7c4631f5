"""What another user of this machine can do to a training that is under way: nothing.

Everything happens in a network namespace made here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.lab.testbed.machine import finished
from tests.lab.training.test_compressed import few_images

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

VICTIM = """
import signal, subprocess, sys
from pathlib import Path
from syncline.lab.testbed import kernel

kernel.unshare(kernel.NETWORK)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

def listening():
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == "0A":
                found.add((address, int(port, 16)))
    return found

train = "from syncline.cli import main; main()"
options = ["train", "--epochs", "5000", *sys.argv[3].split(), "--report", sys.argv[1] + "/report"]
stranger = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.PIPE, text=True)
job = subprocess.Popen([sys.executable, "-c", train, *options], stderr=subprocess.PIPE, bufsize=0)
job.stderr.readline()  # an epoch is over
open_to = listening()
print("addresses", *sorted({address for address, _ in open_to}))
stranger.communicate(" ".join(str(port) for _, port in open_to))
job.stderr.read(1 << 16)  # all that was written before the stranger had gone
job.stderr.readline()  # may have begun before
if job.stderr.readline().startswith(b"epoch "):
    print("the training goes on")
job.send_signal(signal.SIGINT)
print("ended with", job.wait())
"""

STRANGER = """
import os, socket, struct, sys

os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
VALIDATE, KEYS = struct.pack("=BI", 0, 0x3C85F7CE), b"\\7"
for port in map(int, sys.stdin.read().split()):
    silent, garbage, curious = (socket.socket() for _ in range(3))
    for tried in (silent, garbage, curious):
        tried.settimeout(2)
        tried.connect(("127.0.0.1", port))
    garbage.sendall(os.urandom(4096))
    try:
        curious.sendall(VALIDATE + KEYS)  # as torch's TCPStore asks for the number of keys
        answered = len(curious.recv(8)) == 8
    except OSError:
        answered = False
    print("a store" if answered else "no store")
"""


def test_the_stranger_would_find_a_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_as_stranger(store.port) == "a store\n"


def run_as_stranger(port: int) -> str:
    command = [sys.executable, "-c", STRANGER]
    return subprocess.check_output(command, input=str(port), text=True)


@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
@pytest.mark.slow
def test_a_stranger_finds_no_store_and_disturbs_nothing(tmp_path: Path) -> None:
    victim = (sys.executable, "-c", VICTIM, tmp_path, STRANGER, few_images(tmp_path))
    result = finished(*victim, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    loopback = "0100007F"
    assert result.stdout.splitlines() == [
        f"addresses {loopback}",
        *("no store", "no store"),  # one socket of Gloo's for each worker
        "the training goes on",
        "ended with 130",
    ], result.stderr
