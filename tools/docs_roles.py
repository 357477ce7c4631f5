"""A hook of MkDocs: docstrings mark names by roles, ``:class:`Plan```; pages show names alone."""

from __future__ import annotations

import re

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?([\w.]+)</code>")


def on_page_content(html: str, /, **_: object) -> str:
    """Return the page with each role replaced by what it marks."""
    return ROLE.sub(r"<code>\1</code>", html)
