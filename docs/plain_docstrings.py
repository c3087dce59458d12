"""Docstrings of quicoll are plain text, as `help` shows them. This makes of one what Sphinx reads."""

from __future__ import annotations

import re

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
_ENTRY = re.compile(r"[a-z_]\w*(, [a-z_]\w*)*: ")


def plain_to_rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText.

    What is indented is code or a table, and stays as it is. Lines of `name: what it is`, with what they need of further
    lines behind them, become a list. The sections that napoleon knows are left to it.
    """
    made: list[str] = []
    kind = "text"  # of the lines at hand: text, a list, indented ones, a section
    for line in lines:
        indented = line.startswith(" ")
        if not line.strip():
            kind = kind if kind in ("section", "indented") else "text"
            made.append("")
        elif not indented and _SECTION.match(line):
            kind = "section"
            made.append(line)
        elif kind == "section" and indented:
            made.append(line)
        elif not indented and _ENTRY.match(line) and (kind == "list" or not made or not made[-1]):
            kind = "list"
            made.append(f"- {_escaped(line)}")
        elif kind == "list":
            made.append(f"  {_escaped(line.strip())}")
        elif indented:
            if kind != "indented":
                made += ["", ".. code-block:: text", ""]
            kind = "indented"
            made.append(line)
        else:
            if kind == "indented":
                made.append("")
            kind = "text"
            made.append(_escaped(line))
    return made


def _escaped(line: str) -> str:
    """A star outside of code is a star."""
    return "`".join(part if at % 2 else part.replace("*", r"\*") for at, part in enumerate(line.split("`")))
