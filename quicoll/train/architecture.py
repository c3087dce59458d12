"""Whether workers train the same thing: names, types and shapes of the parameters, and what a task says beside them.

The ranks compare it by digest in each view, before anything of their states moves (quicoll.state.description): a worker
that is not like the others gets a LocalError that names it and the first difference, and the others go on without it.
It is a part of the state, too, as one text: so a checkpoint of another architecture is refused, with what differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from quicoll.errors import LocalError

__all__ = ["Architecture"]

_SHOWN = 5  # differences that an error names; it says how many there are


@dataclass(frozen=True, slots=True)
class Architecture:
    """See the module's head.

    Attributes:
        lines: Names and what is there, in order; each name once.
    """

    lines: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Any], settings: Mapping[str, Any]) -> Architecture:
        """Describe a task.

        Args:
            parameters: Tensors by name; their order counts.
            settings: What else has to be the same, by name; their order does not count. A text of several lines is
                compared line by line.
        Returns:
            The description.
        """
        tensors = [
            (f"parameter {name}", f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}")
            for name, tensor in parameters.items()
        ]
        return cls((*tensors, *(line for name in sorted(settings) for line in _lines(name, str(settings[name])))))

    @classmethod
    def parse(cls, text: Any) -> Architecture:
        """Read what `text` gives.

        Args:
            text: From another rank or a checkpoint.
        Returns:
            The description.
        Raises:
            LocalError: It is none.
        """
        try:
            return cls(tuple((name + "", what + "") for name, what in json.loads(text)))
        except (TypeError, ValueError) as error:
            raise LocalError(f"this is no description of an architecture: {error}") from error

    @property
    def text(self) -> str:
        """All of it in one text, for a state."""
        return json.dumps(self.lines)

    @property
    def digest(self) -> str:
        """BLAKE2b-128 of it in hexadecimal: equal where all of it is."""
        return blake2b(self.text.encode(), digest_size=16).hexdigest()

    def demand_same(self, other: Architecture) -> None:
        """Refuse another architecture than this.

        Args:
            other: That of the job.
        Raises:
            LocalError: They differ; says in what.
        """
        if other.digest == self.digest:
            return
        here, there = dict(self.lines), dict(other.lines)
        found = [
            f"{name} is {here.get(name, 'not there')} here and {there.get(name, 'not there')} in the job"
            for name in dict.fromkeys([*here, *there])
            if here.get(name) != there.get(name)
        ] or ["the parameters stand in another order"]
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise LocalError(
            f"this worker does not train what the job trains (architecture {self.digest} here, {other.digest} there): "
            f"{'; '.join(found[:_SHOWN])}{more}"
        )


def _lines(name: str, text: str) -> list[tuple[str, str]]:
    lines = text.split("\n")
    return [(name, text)] if len(lines) == 1 else [(f"{name}, line {n}", line) for n, line in enumerate(lines, 1)]
