"""Files of raw results: JSON, compressed where that is large."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PLAIN_BYTES = 100_000
"""Up to this size a file stays readable, and a change of it a readable difference."""


def read(path: Path) -> Any:
    """Return the content of ``path``, a name that ends in ``.json``, or of ``path`` with ``.gz``.

    Raises:
        FileNotFoundError: neither is there.
    """
    packed = _packed(path)
    if packed.exists():
        return json.loads(gzip.decompress(packed.read_bytes()))
    return json.loads(path.read_text())


def exists(path: Path) -> bool:
    """Return whether :func:`read` has something to read."""
    return path.exists() or _packed(path).exists()


def write(path: Path, content: Any, *, ensure_ascii: bool = True) -> Path:
    """Write ``content`` in place of what was there, and return the file that now holds it."""
    text = json.dumps(content, indent=1, ensure_ascii=ensure_ascii) + "\n"
    data, target, other = text.encode(), path, _packed(path)
    if len(data) > PLAIN_BYTES:
        data, target, other = (
            gzip.compress(data, mtime=0),
            other,
            path,
        )  # equal content, equal bytes
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(target)
    other.unlink(missing_ok=True)
    return target


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")
