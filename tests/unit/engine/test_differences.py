"""What calls differ in, in one sentence, whatever text a peer sends."""

from __future__ import annotations

import pytest

from quicoll.engine.differences import brief, difference

SUM = (
    "all_reduce/auto world=2 elements=4 leaves=2 itemsize=8 wide_itemsize=8 chunk_bytes=1048576 dtype=float64 "
    "shape=(4) op=sum precision=default"
)


def changed(*pairs: tuple[str, str], of: str = SUM) -> str:
    for old, new in pairs:
        assert old in of
        of = of.replace(old, new)
    return of


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (changed(("(4)", "(3)"), ("elements=4", "elements=3")), "shape (4,) on rank 0, (3,) on rank 1"),
        (changed(("(4)", "(2,2)")), "shape (4,) on rank 0, (2, 2) on rank 1"),
        (changed(("(4)", "()")), "shape (4,) on rank 0, () on rank 1"),
        (changed(("(4)", "list:(2);(2,1)")), "shape (4,) on rank 0, [(2,), (2, 1)] on rank 1"),
        (
            changed(("float64", "float32"), ("size=8", "size=4"), ("op=sum", "op=avg")),
            "dtype float64 on rank 0, float32 on rank 1; op sum on rank 0, avg on rank 1",
        ),
        (changed(("/auto", "/tree")), "algorithm auto on rank 0, tree on rank 1"),
        (f"{SUM} wire=int8", "wire none on rank 0, int8 on rank 1"),
        (f"{SUM} group=0:1", "group none on rank 0, 0:1 on rank 1"),
        (changed(("1048576", "65536")), "chunk_bytes 1048576 on rank 0, 65536 on rank 1"),
    ],
)
def test_only_what_differs_is_named_with_the_values_of_the_ranks(other: str, said: str) -> None:
    assert difference({0: SUM, 1: other}) == f"the ranks called all_reduce differently: {said}"
    assert brief(SUM) == "all_reduce of float64 (4,)"


def test_of_different_operations_nothing_else_is_compared() -> None:
    gather = "all_gather/auto dtype=int8 trailing=3,2 chunk_bytes=64"
    said = difference({1: gather, 0: SUM, 2: "barrier/dissemination world=2"})
    assert said == "rank 0 called all_reduce of float64 (4,), rank 1 called all_gather of int8, rank 2 called barrier"
    other = gather.replace("3,2", "-")
    assert difference({0: gather, 1: other}).endswith(": shape of a row (3, 2,) on rank 0, () on rank 1")


def test_counts_are_named_where_the_shapes_are_equal() -> None:
    first = "reduce_scatter/auto counts=2,2 dtype=int8 shape=(4)"
    assert difference({0: first, 1: first.replace("2,2", "1,3")}).endswith(": counts 2,2 on rank 0, 1,3 on rank 1")


def test_of_many_ranks_the_sides_are_named() -> None:
    other = changed(("(4)", "(3)"))
    called = {rank: other if rank == 7 else SUM for rank in range(12)}
    assert difference(called).endswith("shape (4,) on ranks 0, 1, 2, 3 and 7 more, (3,) on rank 7")


@pytest.mark.parametrize(
    "hostile", ["", " ", "=", "a=b=c", "all_reduce/auto\nrank=0", "x" * 4096, "all_reduce/ shape=((((", f"{SUM} {SUM}"]
)
def test_any_text_of_a_peer_gives_one_short_line(hostile: str) -> None:
    said = difference({0: SUM, 1: hostile})
    assert said
    assert said.isprintable()
    assert len(said) < 800
    assert brief(hostile).isprintable()


def test_fields_in_another_order_are_a_difference_too() -> None:
    swapped = changed((" op=sum precision=default", " precision=default op=sum"))
    assert difference({0: SUM, 1: swapped}).endswith("differently: in the order of its fields")
