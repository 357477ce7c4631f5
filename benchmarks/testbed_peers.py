"""What runs on the hosts of ``testbed_rates``: a TCP transfer, and all-reduces over Gloo.

Each peer prints one JSON object: the seconds of every repetition, by size in bytes. The first
repetition of a size is not counted.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable

PORT = 5000
PAUSE_S = 0.05
"""Before every repetition, so that each finds the links idle."""
MARK = b"."


def main() -> None:
    kind, sizes, repetitions = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    {"tcp": tcp, "gloo": gloo}[kind](sizes, repetitions)


def timed(
    sizes: list[int],
    repetitions: int,
    action: Callable[[int], None],
    line_up: Callable[[], object] = lambda: None,
) -> None:
    result = {}
    for size_bytes in sizes:
        times_s = []
        for _ in range(repetitions + 1):
            time.sleep(PAUSE_S)
            line_up()
            began_s = time.perf_counter()
            action(size_bytes)
            times_s.append(time.perf_counter() - began_s)
        result[size_bytes] = times_s[1:]
    if os.environ["RANK"] == "0":
        print(json.dumps(result))


def tcp(sizes: list[int], repetitions: int) -> None:
    """Send from rank 0 to rank 1, which answers with one byte when it has everything."""
    if os.environ["RANK"] == "1":
        with socket.create_server(("", PORT)) as server, server.accept()[0] as connection:
            buffer = bytearray(1 << 20)
            for size_bytes in [s for s in sizes for _ in range(repetitions + 1)]:
                missing = size_bytes
                while missing:
                    missing -= connection.recv_into(buffer, min(missing, len(buffer)))
                connection.sendall(MARK)
        return
    data = memoryview(bytes(max(sizes)))
    with connected("host1") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def exchange(size_bytes: int) -> None:
            connection.sendall(data[:size_bytes])
            assert connection.recv(1) == MARK

        timed(sizes, repetitions, exchange)


def connected(host: str) -> socket.socket:
    while True:  # the benchmark's own deadline ends this
        try:
            return socket.create_connection((host, PORT))
        except ConnectionRefusedError:
            time.sleep(PAUSE_S)


def gloo(sizes: list[int], repetitions: int) -> None:
    """All-reduce vectors of 32-bit numbers, all ranks beginning together."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    vectors = {size_bytes: torch.ones(size_bytes // 4) for size_bytes in sizes}
    timed(sizes, repetitions, lambda size: dist.all_reduce(vectors[size]), dist.barrier)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
