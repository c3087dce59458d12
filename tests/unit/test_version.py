"""The version stands in several files; it is one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import quicoll

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_same_wherever_it_stands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changelog = re.findall(r"^## \[(.*?)\]( - \d{4}-\d{2}-\d{2})?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changelog[0] == ("Unreleased", "")
    assert {project["version"], quicoll.__version__, cited, changelog[1][0]} == {quicoll.__version__}
    (released,) = re.findall(r"^date-released: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert changelog[1][1] == f" - {released}"
