"""What ranks have called, in words: a call in brief, and in what calls differ.

A signature is text: the operation, then `key=value` for everything that has to be equal on all ranks. It comes from a
peer, so nothing of it is trusted: any text has a difference from any other, what is quoted of it is short, and a line
stays a line.

Some fields follow from others: the number of elements from the shape. They are named only where nothing that they
follow from differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["brief", "difference"]

_MAX_VALUE = 80
_MAX_NAMED = 4  # ranks, or different values, that a sentence names
_OPERATION = "operation"
_FOLLOWING = ("elements", "counts", "itemsize", "wide_itemsize", "loose")
_LEADING = ("algorithm", "leaves", "dtype", "shape", "trailing", "precision", "wire")
_ORDER = ("group", "root", "dtype", "shape", "trailing", "op", "precision", "wire", "leaves", "algorithm")
_WORDS = {"trailing": "shape of a row", "number": "number of the split", "world": "ranks"}
_SHAPE = re.compile(r"\(\d*(,\d+)*\)")


def brief(signature: str) -> str:
    """Return a call as it is named in a sentence: the operation, and of what."""
    fields = _fields(signature)
    what = " ".join(_value(key, fields) for key in ("dtype", "shape") if key in fields)
    return f"{_value(_OPERATION, fields)}{f' of {what}' if what else ''}"


def difference(called: Mapping[int, str]) -> str:
    """Say in what calls differ.

    Args:
        called: Signatures by rank, not all equal.
    Returns:
        A sentence that names the ranks.
    """
    fields = {rank: _fields(called[rank]) for rank in sorted(called)}
    if len({each[_OPERATION] for each in fields.values()}) > 1:
        sides = _sides({rank: brief(called[rank]) for rank in fields})
        return ", ".join(f"{_ranks(ranks)} called {what}" for what, ranks in sides)
    keys = dict.fromkeys(key for each in fields.values() for key in each)
    differing = [key for key in keys if len({each.get(key) for each in fields.values()}) > 1]
    if any(key in _LEADING for key in differing):
        differing = [key for key in differing if key not in _FOLLOWING]
    differing.sort(key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    parts: list[str] = []
    for key in differing[:_MAX_NAMED]:
        sides = _sides({rank: _value(key, each) for rank, each in fields.items()})
        parts.append(f"{_WORDS.get(key, key)} " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in sides))
    operation = _value(_OPERATION, next(iter(fields.values())))
    return f"the ranks called {operation} differently: {'; '.join(parts) or 'in the order of its fields'}"


def _fields(signature: str) -> dict[str, str]:
    """The operation and the other fields, in their order. A word that is no field belongs to the one before it."""
    operation, *words = signature.split(" ")
    operation, _, algorithm = operation.partition("/")
    fields = {_OPERATION: operation}
    if algorithm:
        fields["algorithm"] = algorithm
    last = _OPERATION
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key not in fields:
            fields[key], last = value, key
        else:
            fields[last] += f" {word}"
    return fields


def _value(key: str, fields: Mapping[str, str]) -> str:
    value = fields.get(key)
    if value is None:
        return "none"
    if key == "shape":
        value = _shapes(value)
    elif key == "trailing":
        value = f"({'' if value == '-' else ', '.join(value.split(',')) + ','})"
    plain = "".join(letter if letter.isprintable() else "?" for letter in value)
    return plain if len(plain) <= _MAX_VALUE else f"{plain[:_MAX_VALUE]}..."


def _shapes(value: str) -> str:
    """Shapes as Python writes them."""
    parts = value.removeprefix("list:").split(";")
    if not all(_SHAPE.fullmatch(part) for part in parts):
        return value
    shapes = [part.replace(",", ", ") if "," in part or part == "()" else f"{part[:-1]},)" for part in parts]
    return f"[{', '.join(shapes)}]" if value.startswith("list:") else shapes[0]


def _sides(values: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    sides: dict[str, list[int]] = {}
    for rank, value in values.items():
        sides.setdefault(value, []).append(rank)
    return list(sides.items())[:_MAX_NAMED]


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}{more}"
