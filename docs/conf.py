"""How Sphinx builds these pages: `make docs` writes var/docs."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

from mediatord import __version__  # noqa: E402

project = "mediatord"
author = "the authors of mediatord"
version = release = __version__
language = "en-GB"
html_title = f"mediatord {__version__}"

extensions = ["myst_parser", "repository"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["images", "extensions", "static"]
# Anchors are those that the code host makes of headings, so that links work in both places.
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings: list[str] = []
nitpicky = True

# What has no language is no Python.
highlight_language = "none"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["mediatord.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"footer_icons": []}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

linkcheck_timeout = 20
linkcheck_retries = 2
# Examples, and what only answers a mediator.
linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)", r"https?://([a-z0-9.-]+\.)?example(\.com)?\b"]
