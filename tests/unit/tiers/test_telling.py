"""What ranks tell each other is read within bounds, for tiers and for shared state alike."""

from __future__ import annotations

import msgspec
import pytest

from quicoll.errors import PeerError
from quicoll.membership.view import Member, View
from quicoll.tiers.agreement import MAX_REASON, TierBallot, TierVerdict
from quicoll.tiers.settling import PieceListing
from quicoll.tiers.telling import told
from quicoll.tiers.tier_set import TierSet

VIEW = View(
    view_id=9,
    members=tuple(Member(rank=rank, node=f"n{rank}", incarnation=1) for rank in range(4)),
    seed=1,
    committed_step=0,
    committed_view=0,
)
NOW = TierSet(["hot"], version=3)


def test_what_ranks_tell_is_read_and_what_cannot_be_is_the_fault_of_its_rank() -> None:
    ballots = [TierBallot(NOW.digest, NOW.version)] * 4
    sent = [msgspec.msgpack.decode(msgspec.msgpack.encode(ballot)) for ballot in ballots]
    assert told(TierBallot, sent, view=VIEW, what="a set of tiers") == ballots
    for wrong in (None, [], [b"short", 3, b""], [NOW.digest, -1, b""], {"held": 1}, [NOW.digest, 3, b"", 4]):
        with pytest.raises(PeerError, match="tells what cannot be of a set of tiers") as caught:
            told(TierBallot, [*sent[:3], wrong], view=VIEW, what="a set of tiers")
        assert (caught.value.rank, caught.value.node, caught.value.view) == (3, "n3", 9)
    with pytest.raises(PeerError, match="length <= 512"):
        told(TierVerdict, [["x" * (MAX_REASON + 1)]], view=VIEW, what="a set of tiers")


@pytest.mark.parametrize("dtype", ["float63", "float32"])
def test_what_a_check_of_ours_refuses_is_the_fault_of_its_rank_as_well(dtype: str) -> None:
    entry = ["p", [0, 0, "n0", b"0" * 16], "bytes", dtype, [1]]
    with pytest.raises(PeerError, match="tells what cannot be of the shared state 's'") as caught:
        told(PieceListing, [[[entry]]], view=VIEW, what="the shared state 's'")
    assert caught.value.node == "n0"
