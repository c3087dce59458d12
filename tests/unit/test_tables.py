"""The tables of the documents against the code: settings, defaults, events, errors."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import quicoll
from quicoll import Config, errors
from quicoll.checks import MAX_ADDRESSES, MAX_MEMBERS
from quicoll.engine.calls import MAX_AHEAD, MAX_AHEAD_BYTES
from quicoll.engine.early import MAX_EARLY_BYTES
from quicoll.membership.coordinator.evidence import MAX_VIEWS, VIEW_INTERVAL_NS
from quicoll.membership.messages import MAX_DIGEST, MAX_GROUPS, MAX_MESSAGE, MAX_TEXT
from quicoll_transport import errors as transport_errors
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.net.resolver import MOST

ROOT = Path(__file__).parents[2]


def table(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table below this heading, without its head."""
    _, found, below = (ROOT / document).read_text().partition(f"\n## {heading}\n")
    assert found, f"{document} has no {heading!r}"
    rows: list[list[str]] = []
    for line in below.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_table_of_settings_has_all_of_them_with_their_defaults() -> None:
    units = {"": 1, "MiB": 1 << 20, "s": 1}
    config = Config.resolve(environ={}, listen="127.0.0.1:0")
    rows = {quoted(name)[0]: default for name, default, _, _ in table("docs/settings.md", "Settings of a rank")}
    assert list(rows) == list(config.sources)
    for name, default in rows.items():
        value = getattr(config, name)
        if name in ("node", "listen"):
            continue
        if default in ("none", "left to the coordinator", "the job's"):
            assert value in (None, ""), name
        elif default in ("on", "off"):
            assert value is (default == "on"), name
        elif default.startswith("`"):
            assert quoted(default) == [value], name
        else:
            number, _, unit = default.partition(" ")
            assert value == float(number) * units[unit], name


def test_the_table_of_settings_has_what_torchrun_gives() -> None:
    given = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "x",
    }
    sources = Config.resolve(environ=given, listen="127.0.0.1:0").sources
    for name, _, torchrun, _ in table("docs/settings.md", "Settings of a rank"):
        told = ", ".join(re.findall(r"[A-Z_]{4,}", torchrun))
        assert (sources[quoted(name)[0]] if told else "") == told, name


@pytest.mark.parametrize("setting", [name for row in table("docs/transport.md", "Tuning") for name in quoted(row[0])])
def test_every_setting_of_the_transport_that_is_explained_is_there(setting: str) -> None:
    found: object = EndpointConfig()
    for part in setting.split("."):
        found = getattr(found, part)


def test_the_defaults_of_the_transport_are_those_that_are_told() -> None:
    scales = {"s": 10**9, "ms": 10**6, "MiB": 1 << 20}
    checked = 0
    for names, defaults, _ in table("docs/transport.md", "Tuning"):
        for setting, default in zip(quoted(names), re.split(r", (?=\d+ ?(?:s|ms|MiB)?$|\d+$)", defaults), strict=False):
            value: object = EndpointConfig()
            for part in setting.split("."):
                value = getattr(value, part)
            number = re.fullmatch(r"(\d+)(?: (s|ms|MiB))?", default)
            if number is not None:
                assert value == int(number[1]) * scales.get(number[2] or "", 1), setting
                checked += 1
            elif default in ("none", "cubic"):
                assert value in (None, default), setting
                checked += 1
    assert checked >= 8


def _emitted() -> dict[str, set[str]]:
    """Kinds of events with the fields that some call gives them, of both ends together."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "quicoll").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and called in ("emit", "_emit"):
                kind = node.args[0]
                if isinstance(kind, ast.Constant):
                    found.setdefault(str(kind.value), set()).update(each.arg or "" for each in node.keywords)
    return found


def test_the_table_of_events_has_all_kinds_with_their_fields() -> None:
    told = {quoted(kind)[0]: quoted(fields) for kind, _, fields in table("docs/settings.md", "Events")}
    told["fault"].remove("quicoll.testing")
    assert {kind: set(fields) for kind, fields in told.items()} == _emitted()
    assert all(f"{kind}(" in (quicoll.Event.__doc__ or "") for kind in told)


def test_the_tables_of_errors_name_errors_that_are_there_and_say_right_what_goes_on() -> None:
    for name, _, group in table("README.md", "What the errors mean"):
        found = getattr(errors, quoted(name)[0])
        assert found.usable is (group == "as usable as before"), name
    told = {quoted(row[0])[0]: row[2] for row in table("docs/transport.md", "Errors")}
    ours = {name for name in transport_errors.__all__ if name != "TransportError"}
    assert set(told) == ours
    for name, link in told.items():
        if link in ("goes on", "over"):
            assert getattr(transport_errors, name).usable is (link == "goes on"), name


def test_the_page_of_errors_has_all_of_them_and_says_right_what_goes_on() -> None:
    told = {quoted(row[0])[0]: row[3] for row in table("docs/errors.md", "Of a job")}
    ends = {"Terminated", "Dismissed"}  # which are no errors
    assert set(told) == {*errors.__all__} - ends - {"QuicollError"}
    for name, group in told.items():
        assert getattr(errors, name).usable is (group == "as usable as before"), name
    text = (ROOT / "docs" / "errors.md").read_text()
    assert [name for name in sorted(ends) if f"`{name}`" not in text] == []
    of_a_run = {quoted(row[0])[0] for row in table("docs/errors.md", "Of a simulated run")}
    assert of_a_run == {f"quicoll.sim.{name}" for name in quicoll.sim.__all__ if issubclass_of_error(name)}


def issubclass_of_error(name: str) -> bool:
    found = getattr(quicoll.sim, name)
    return isinstance(found, type) and issubclass(found, errors.QuicollError)


def test_every_bound_on_members_has_a_test_that_is_there() -> None:
    tests = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    rows = table("docs/security.md", "Bounds")
    assert len(rows) > 20
    for what, bound, where, named in rows:
        assert bound, what
        assert where in ("coordinator", "ranks", "both", "relay", "coordinator, ranks"), what
        assert quoted(named), what
        assert [name for name in quoted(named) if f"def {name}(" not in tests] == [], what


def test_the_bounds_on_members_are_those_of_the_code() -> None:
    """Figures that stand in the code under a name."""
    bounds = {what: bound for what, bound, _, _ in table("docs/security.md", "Bounds")}
    views = f"{MAX_VIEWS} at once, {60 * 10**9 // VIEW_INTERVAL_NS} a minute"
    assert bounds["views proposed, by whatever it does"] == views
    assert bounds["nodes connected"] == str(MAX_MEMBERS)
    assert bounds["announcements for a view to come"].startswith(f"{MAX_EARLY_BYTES >> 20} MiB for each link")
    ahead = f"{MAX_AHEAD_BYTES >> 20} MiB and {MAX_AHEAD} operations"
    assert bounds["announcements of the present view"].startswith(ahead)
    assert bounds["an announcement"] == f"4096 characters, {MAX_MEMBERS} counts, {2 * MAX_MEMBERS} measurements"
    texts = f"{MAX_MESSAGE >> 20} MiB; texts {MAX_TEXT} characters, digests {MAX_DIGEST} bytes, {MAX_GROUPS} sub-groups"
    assert bounds["a membership message"] == texts
    assert bounds["addresses of a member"].startswith(f"{MAX_ADDRESSES}, ")
    assert bounds["names looked up for its addresses"].startswith(f"{MOST} at a time")
