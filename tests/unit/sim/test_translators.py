"""Which simulated workers are behind which address translator, and which of them need a relay."""

from __future__ import annotations

import pytest

from quicoll.errors import LocalError
from quicoll.sim.translators import opens, translators
from quicoll_transport.sim import NatKind


def test_an_entry_is_a_kind_or_the_number_of_who_has_one() -> None:
    found = translators(("", "symmetric", "full-cone", "1", "2"))
    assert found == {
        1: (1, NatKind.SYMMETRIC),
        2: (2, NatKind.FULL_CONE),
        3: (1, NatKind.SYMMETRIC),
        4: (2, NatKind.FULL_CONE),
    }
    assert translators(()) == {}


@pytest.mark.parametrize("nats", [("round",), ("0",), ("", "0"), ("symmetric", "0", "1"), ("1", "symmetric"), ("-1",)])
def test_any_other_entry_is_refused_by_name(nats: tuple[str, ...]) -> None:
    with pytest.raises(LocalError, match="is no kind of address translator, nor an earlier worker"):
        translators(nats)


def test_a_relay_is_needed_where_one_is_symmetric_and_the_other_lets_in_by_port() -> None:
    nats = ("full-cone", "restricted-cone", "port-restricted-cone", "symmetric", "symmetric", "3", "")
    pairs = [(one, other) for one in range(8) for other in range(8) if one != other and not opens(nats, one, other)]
    assert pairs == [(2, 3), (2, 4), (2, 5), (3, 2), (3, 4), (4, 2), (4, 3), (4, 5), (5, 2), (5, 4)]
