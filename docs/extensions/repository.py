"""
Files of the repository as pages: CONTRIBUTING.rst, whose links lead to other files, and the news that were not
released yet; and names of code that may be broken where their parts end.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).parents[2]
_PAGE = re.compile(r"docs/([a-z/-]+)\.md(#[\w-]+)?")
_CODE = re.compile(r'(?<=<span class="pre">)[^<]+')
_PART = re.compile(r"(?<=[_./-])(?=[a-zA-Z])(?!py\b)")
_KINDS = {"feature": "Added", "bugfix": "Fixed", "doc": "Documentation", "removal": "Removed"}
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Take part in the build."""
    app.connect("source-read", _put_in_news)
    app.connect("doctree-resolved", _lead_to_pages)
    app.connect("html-page-context", _break_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _put_in_news(app: Sphinx, page: str, source: list[str]) -> None:
    if page == "changelog":
        app.env.note_dependency(str(ROOT / "newsfragments"))
        source[0] = source[0].replace("<!-- news -->", "\n".join(_news()))


def _news() -> list[str]:
    """What the fragments say, by kind, as reStructuredText in Markdown."""
    lines: list[str] = []
    for kind, title in _KINDS.items():
        found = sorted((ROOT / "newsfragments").glob(f"*.{kind}.rst"))
        if found:
            texts = (f"* {fragment.read_text('utf-8').strip()}" for fragment in found)
            lines += [f"### {title}", "", "```{eval-rst}", *texts, "```", ""]
    return lines


def _lead_to_pages(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Links of included files are relative to the root of the repository."""
    for link in tree.findall(nodes.reference):
        match = _PAGE.fullmatch(link.get("refuri", ""))
        if not match:
            continue
        if match[1] not in app.env.all_docs:
            _log.warning("no such page: %s", match[0], location=link)
        link["refuri"] = app.builder.get_relative_uri(page, match[1]) + (match[2] or "")


def _break_names(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """In a narrow column, `mediator_storage_up` breaks behind an underscore; what is copied is the same."""
    if "body" in context:
        context["body"] = _CODE.sub(lambda match: _PART.sub("<wbr>", match[0]), context["body"])
