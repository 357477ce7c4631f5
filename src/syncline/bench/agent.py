"""What an MPI calls in place of ssh: ``python -m syncline.bench.agent SOCKET HOST COMMAND...``.

It has the leading process start the command on the emulated host, and stays until that is over.
"""

from __future__ import annotations

import sys

from syncline.bench.messages import Remote, connected, send

__all__ = ["main"]

START_S = 60.0


def main(arguments: list[str]) -> int:
    """Pass a command on; return 0 once the leading process has closed the connection."""
    path, *rest = arguments
    host, *command = [word for index, word in enumerate(rest) if index or not word.startswith("-")]
    with connected(path, START_S) as connection:
        send(connection, Remote(host=host, command=" ".join(command)))
        connection.settimeout(None)
        connection.recv(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
