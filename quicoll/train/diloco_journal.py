"""The journal of a DiLoCo job: what was decided in its rounds that neither the recipe nor the samples say.

A round's bits follow from the committed state, its number and the samples, unless something happened that only a clock
or a failure knows: a slow rank's workers were stopped before the end of a stretch (quicoll.train.diloco_quorum), or a
worker's own memory was lost with all ranks that held it, and it began anew. Both are decided once, are known to all
ranks before a round is committed, and are committed with it, as a part of the job's state. So

    a job with the same recipe, samples and journal, on any number of ranks, has the same bits

and `DiLoCo(..., replay=journal)` is that job. Rounds in which nothing happened are not in it: an ordinary job's is
empty.

Invariants. Entries are in the order of rounds, each once. What is read of a text that somebody gives is bounded before
anything follows from it: workers that there are, and no more inner steps than a stretch has (`demand`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from quicoll.errors import LocalError

__all__ = ["RoundEntry", "RoundJournal"]

_Count = Annotated[int, msgspec.Meta(ge=0)]


class RoundEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What happened in a round.

    Attributes:
        number: Of the round.
        anew: The workers that began it anew, ascending.
        done: For each stretch of the round, how many of its inner steps each worker did; empty: all did all.
    """

    number: Annotated[int, msgspec.Meta(ge=1)]
    anew: tuple[_Count, ...] = ()
    done: tuple[tuple[_Count, ...], ...] = ()


_decoder = msgspec.json.Decoder(list[RoundEntry])


class RoundJournal:
    """See the module's head. Grows by `with_entry`; a journal itself does not change."""

    def __init__(self, entries: Sequence[RoundEntry] = ()) -> None:
        """Take entries.

        Args:
            entries: In the order of rounds.
        """
        self._entries = {each.number: each for each in entries}
        self._text = msgspec.json.encode(list(entries)).decode() if entries else ""

    @classmethod
    def parse(cls, text: str) -> RoundJournal:
        """Read what `text` gave.

        Args:
            text: Of a journal; empty for one without entries.
        Returns:
            The journal.
        Raises:
            LocalError: It is none.
        """
        if not text:
            return cls()
        try:
            entries = _decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LocalError(f"this is no journal of DiLoCo: {error}") from error
        numbers = [each.number for each in entries]
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            raise LocalError("this is no journal of DiLoCo: its rounds are not in order")
        return cls(entries)

    @property
    def text(self) -> str:
        """The journal as text; empty without entries."""
        return self._text

    def of_round(self, number: int) -> RoundEntry:
        """Return what happened in a round.

        Args:
            number: Of the round.
        """
        return self._entries.get(number, RoundEntry(max(number, 1)))

    def with_entry(self, entry: RoundEntry) -> RoundJournal:
        """Return the journal with one more round in which something happened; itself where nothing did.

        Args:
            entry: Of a round after all that are here.
        """
        return RoundJournal([*self._entries.values(), entry]) if entry.anew or entry.done else self

    def demand(self, workers: int, stretches: Sequence[range]) -> None:
        """Refuse a journal of another recipe.

        Args:
            workers: How many there are.
            stretches: The inner steps of each, in a round.
        Raises:
            LocalError: It names workers that there are not, or more inner steps than a stretch has.
        """
        for each in self._entries.values():
            fits = not each.done or (
                len(each.done) == len(stretches)
                and all(len(row) == workers for row in each.done)
                and all(max(row) <= len(stretch) for row, stretch in zip(each.done, stretches, strict=True))
            )
            if not fits or any(worker >= workers for worker in each.anew):
                raise LocalError(
                    f"the journal's round {each.number} is not one of {workers} workers and "
                    f"{len(stretches)} stretches of {', '.join(str(len(stretch)) for stretch in stretches)} inner steps"
                )
