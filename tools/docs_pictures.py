"""A hook of MkDocs: pages may show pictures that lie outside docs, where scripts write them."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDERS = ("benchmarks/results", "reproduce/pictures")


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the pictures to the site under their folders' names."""
    root = Path(config.config_file_path).parent
    for folder in FOLDERS:
        for picture in sorted((root / folder).glob("*.png")):
            name = f"{folder}/{picture.name}"
            files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 (the names that MkDocs passes)
    """Point pictures at their place in the site."""
    return re.sub(rf"\]\(\.\./((?:{'|'.join(FOLDERS)})/[\w.-]+\.png)\)", r"](\1)", markdown)
