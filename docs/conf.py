"""The documentation site: `make docs`. The pages are Markdown that also reads well where it lies; see docs/index.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sphinx.errors import ExtensionError

import quicoll

sys.path.insert(0, str(Path(__file__).parent))
from plain_docstrings import plain_to_rst

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "quicoll"
author = "The quicoll authors"
copyright = author
version = release = quicoll.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns: list[str] = []
root_doc = "index"

html_theme = "furo"
html_title = f"quicoll {release}"
html_copy_source = False
html_show_sphinx = False

# Blocks without a language are commands and what they print.
highlight_language = "text"
# In a docstring `this` is code, as it is in the pages.
default_role = "code"

# A link to a heading of a page has to find it.
myst_heading_anchors = 4

# Types in signatures are as they stand in the source: many are of numpy, torch or the standard library, whose pages are
# elsewhere. Links between the pages are all checked (-W), and so is that each public name has its place (below).
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]
# The name of a type alone may stand for two: quicoll.Job, and its blocking mirror. Either is described.
suppress_warnings = ["ref.python"]

autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def _process_docstring(app: Sphinx, what: str, name: str, described: object, options: object, lines: list[str]) -> None:
    lines[:] = plain_to_rst(lines)


def _every_public_name_has_its_place(app: Sphinx, env: BuildEnvironment) -> None:
    """A public name of a module with a page in docs/api is described on it, or on another one under another name."""
    described = {name for name, *_ in env.domains.python_domain.get_objects()}
    pages = [importlib.import_module(page.stem) for page in sorted((Path(app.srcdir) / "api").glob("quicoll*.rst"))]
    there = {
        id(getattr(page, name)) for page in pages for name in page.__all__ if f"{page.__name__}.{name}" in described
    }
    missing = [
        f"{page.__name__}.{name}"
        for page in pages
        for name in page.__all__
        if not isinstance(getattr(page, name), ModuleType) and id(getattr(page, name)) not in there
    ]
    if missing:
        raise ExtensionError(f"public, and described on no page of docs/api: {', '.join(missing)}")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _process_docstring, priority=100)  # before napoleon
    app.connect("env-check-consistency", _every_public_name_has_its_place)
