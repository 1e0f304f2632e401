"""How `make docs` builds the site: Sphinx, MyST for the pages, autodoc for the reference."""

from __future__ import annotations

import re
from typing import Any

import specmeta

project = "specmeta"
release = specmeta.__version__
html_title = f"specmeta {release}"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

# Docstrings say shape and dtype of an argument, which its annotation doesn't.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]
default_role = "code"
maximum_signature_line_length = 88

nitpicky = True
# Types are words for a reader, the errors are Python's own mostly, and attributes stand with their
# class: these lead nowhere.
nitpick_ignore_regex = [("py:(class|attr)", ".*"), ("py:exc", r"\w+")]
suppress_warnings = ["misc.highlighting_failure"]


def contents(app: Any, name: str, source: list[str]) -> None:
    """Make the navigation out of the lists of links in `index.md`, a part for each heading."""
    if name != "index":
        return
    for part in source[0].split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        links = re.findall(r"^- \[([^]]*)\]\(([^)]+)\)", text, re.MULTILINE)
        pages = "\n".join(f"{words} <{page}>" for words, page in links)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def setup(app: Any) -> None:
    """Register the hook."""
    app.connect("source-read", contents)
