"""Scenarios as text, both ways: what a failing run prints is what a person would write, and what the command accepts.

    sim.at(0.3).partition({0, 1}, {2, 3}); sim.at(1.0).heal()
    Settings(lost_after=0.5, conditions=Conditions(latency_ns=2000000))

Text is never executed. It is parsed by `ast`, and walked: statements are calls of `sim.at`, `sim.every` or
`sim.at_vote` with methods of `FaultSchedule` upon them, arguments are literals, or `Conditions(...)` or
`AccessLink(...)` of literals. Anything else raises LocalError with its place. The methods check their arguments as
they do for a program.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import fields
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.sim.outcome import Settings
from quicoll.sim.scenario import events as scenario
from quicoll.sim.scenario import schedule
from quicoll.sim.scenario.schedule import FaultSchedule
from quicoll_transport.errors import TransportError
from quicoll_transport.sim import AccessLink, Conditions

if TYPE_CHECKING:
    from quicoll.sim.scenario.events import ScenarioEvent

__all__ = ["events_source", "parse_events", "parse_settings", "settings_source"]

_METHODS = tuple(name for name in vars(FaultSchedule) if not name.startswith("_") and name != "fault")
_TIMES: dict[str, Callable[..., FaultSchedule]] = {
    "at": schedule.at,
    "every": schedule.every,
    "at_vote": schedule.at_vote,
}
_VALUES: dict[str, Callable[..., object]] = {"AccessLink": AccessLink, "Conditions": Conditions}
_WANTED = "an argument is a literal, Conditions(...) or AccessLink(...)"
_LONGEST = 1 << 20  # characters; a deep nesting could exhaust the parser's stack


def events_source(events: Iterable[ScenarioEvent], *, separator: str = "; ") -> str:
    """Return the statements that make these events, in their order."""
    return separator.join(str(event) for event in events)


def settings_source(settings: Settings) -> str:
    """Return `Settings(...)` with what differs from the defaults, but for the ranks, which the command has by name."""
    usual = Settings()
    changed = []
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if field.name != "ranks" and value != getattr(usual, field.name):
            text = scenario.conditions_source(value) if isinstance(value, Conditions) else repr(value)
            changed.append(f"{field.name}={text}")
    return f"Settings({', '.join(changed)})"


def parse_events(text: str) -> tuple[ScenarioEvent, ...]:
    """Parse statements like `sim.at(1.2).crash(3)`, separated by semicolons or lines. Raises LocalError."""
    found: list[ScenarioEvent] = []
    for statement in _parsed(text, "exec").body:
        if not isinstance(statement, ast.Expr):
            raise _unclear(statement, "a statement is a call like sim.at(1.2).crash(3)")
        _schedule(statement.value, found.append)
    return tuple(found)


def parse_settings(text: str, *, ranks: int) -> Settings:
    """Parse `Settings(...)`, for so many ranks. Raises LocalError."""
    call = _parsed(text, "eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "Settings":
        raise _unclear(call, "settings are written as Settings(lost_after=0.5)")
    positional, named = _arguments(call)
    if "ranks" in named:
        raise _unclear(call, "the number of ranks is not part of the settings here")
    settings: Settings = _made(call, Settings, *positional, ranks=ranks, **named)
    return settings


def _parsed(text: str, mode: str) -> Any:
    if len(text) > _LONGEST:
        raise LocalError(f"a scenario has {_LONGEST} characters at most, not {len(text)}")
    try:
        return ast.parse(dedent(text).strip(), "<scenario>", mode)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise LocalError(f"the scenario cannot be read: {error}") from error


def _schedule(node: ast.expr, add: Callable[[ScenarioEvent], None]) -> FaultSchedule:
    """The schedule that a chain of calls gives; its events are added on the way."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        raise _unclear(node, "a statement is a call like sim.at(1.2).crash(3)")
    name, owner = node.func.attr, node.func.value
    positional, named = _arguments(node)
    if isinstance(owner, ast.Name):
        if owner.id != "sim" or name not in _TIMES:
            raise _unclear(node, f"a statement begins with {', '.join(f'sim.{each}(...)' for each in _TIMES)}")
        times = _TIMES[name]
        begun: FaultSchedule = _made(node, times, *positional, add=add, **named)
        return begun
    schedule = _schedule(owner, add)
    if name not in _METHODS:
        raise _unclear(node, f"there is no fault {name!r} among {', '.join(_METHODS)}")
    _made(node, getattr(schedule, name), *positional, **named)
    return schedule


def _arguments(call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
    named = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _unclear(call, "arguments are written out")
        named[keyword.arg] = _value(keyword.value)
    return [_value(argument) for argument in call.args], named


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        made = _VALUES.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if made is None:
            raise _unclear(node, _WANTED)
        positional, named = _arguments(node)
        return _made(node, made, *positional, **named)
    if isinstance(node, ast.Tuple):
        return tuple(_value(each) for each in node.elts)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise _unclear(node, _WANTED) from error


def _made(node: ast.expr, make: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    try:
        return make(*positional, **named)
    except (LocalError, TransportError) as error:
        raise _unclear(node, str(error)) from error
    except (TypeError, ValueError, AttributeError) as error:  # arguments of a wrong kind or number
        raise _unclear(node, str(error)) from error


def _unclear(node: ast.AST, why: str) -> LocalError:
    return LocalError(f"{ast.unparse(node)[:200]!r}: {why}")
