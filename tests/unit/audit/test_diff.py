"""Two runs are compared: the first difference is named, no rank is named without proof, and gaps are never "equal"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_audit import GATHER, SUM, Scripted, changed, record, script, wrote

from quicoll.audit.diff import Difference, diff
from quicoll.audit.log import AuditLog, OperationRecord, audit_file, load_run
from quicoll.cli.main import main
from quicoll.errors import AuditError


def compared(a: Path, b: Path) -> Difference | None:
    return diff(load_run(a), load_run(b)).difference


# ---------------------------------------------------------------------------------------------------------------------
# The first difference


def test_equal_runs_have_none_whatever_their_world_size(tmp_path: Path) -> None:
    runs = [script(tmp_path / str(world), world=world) for world in (1, 2, 3, 4)]
    for a in runs:
        for b in runs:
            assert compared(a, b) is None


def test_another_leaf_is_named_before_the_results_that_follow_from_it(tmp_path: Path) -> None:
    a = script(tmp_path / "a")

    def change(item: OperationRecord) -> OperationRecord:
        item = changed(2, 1, 1, inputs=((2, "other"), (3, "in2.1.3")))(item)
        return changed(2, 1, None, result="other")(item)

    found = compared(a, script(tmp_path / "b", change=change))
    assert found is not None
    assert (found.kind, found.place.step, found.index, found.rank, found.leaf) == ("inputs", 2, 1, (1, 1), 2)
    assert (found.a, found.b, found.op) == ("in2.1.2", "other", SUM)
    assert str(found).splitlines()[0] == "step 2, call 1, rank 1: leaf 2 has other bits"


def test_another_leaf_is_found_between_worlds_of_different_size(tmp_path: Path) -> None:
    b = Scripted(tmp_path / "b", world=4)
    for step in (1, 2, 3):
        b.step(step, change=lambda item: changed(3, 0, 3, inputs=((3, "other"),))(item))
    b.close()
    found = compared(script(tmp_path / "a", world=2), tmp_path / "b")
    assert found is not None
    assert (found.kind, found.place.step, found.leaf, found.rank) == ("inputs", 3, 3, (1, 3))
    assert "rank 1 of A, 3 of B" in str(found)


@pytest.mark.parametrize("world", [2, 3])
def test_another_result_of_equal_inputs_is_named_by_rank(tmp_path: Path, world: int) -> None:
    a = script(tmp_path / "a", world=2)
    b = script(tmp_path / "b", world=world, change=changed(1, 1, 1, result="other"))
    found = compared(a, b)
    assert found is not None
    assert (found.kind, found.place.step, found.index, found.rank[1]) == ("result", 1, 1, 1)


def test_results_that_belong_to_a_rank_are_not_compared_between_other_worlds(tmp_path: Path) -> None:
    def own(item: OperationRecord) -> OperationRecord:
        return changed(item.step or 0, item.seq, None, agreed=False, result=f"{item.world}.{item.rank}", op=GATHER)(
            item
        )

    runs = [script(tmp_path / str(world), world=world, change=own) for world in (2, 3)]
    assert compared(*runs) is None
    other = script(tmp_path / "other", change=lambda item: changed(2, 0, 1, result="x")(own(item)))
    found = compared(runs[0], other)
    assert found is not None
    assert (found.kind, found.rank) == ("result", (1, 1))


def test_other_calls_and_missing_ones_are_named(tmp_path: Path) -> None:
    a = script(tmp_path / "a")
    found = compared(a, script(tmp_path / "b", change=changed(2, 0, 1, op="barrier")))
    assert found is not None
    assert (found.kind, found.place.step, found.index, found.rank) == ("calls", 2, 0, (1, 1))
    assert found.b == "barrier in group world"
    found = compared(a, script(tmp_path / "c", change=lambda item: None if (item.step, item.seq) == (3, 1) else item))
    assert found is not None
    assert (found.kind, found.place.step, found.index, found.b) == ("missing", 3, 1, "nothing")
    found = compared(a, script(tmp_path / "d", steps=2))
    assert found is not None
    assert (found.kind, found.place.step, found.a, found.b) == ("missing", 3, "2 ranks", "nothing")


def test_the_same_leaf_in_two_groups_at_once_is_two(tmp_path: Path) -> None:
    def grouped(item: OperationRecord) -> OperationRecord:
        return changed(item.step or 0, item.seq, None, group=f"half{item.rank}", inputs=((0, f"{item.rank}"),))(item)

    a = script(tmp_path / "a", change=grouped)
    b = script(tmp_path / "b", change=lambda item: changed(1, 0, 0, inputs=((0, "x"),))(grouped(item)))
    found = compared(a, b)
    assert found is not None
    assert (found.kind, found.rank, found.leaf, found.b) == ("inputs", (0, 0), 0, "x")


def test_attempts_that_were_given_up_do_not_count(tmp_path: Path) -> None:
    a = script(tmp_path / "a")
    b = Scripted(tmp_path / "b")
    b.step(1)
    b.step(2, change=lambda item: changed(2, 0, None, inputs=((0, "x"),))(item) if item.seq == 0 else None)
    b.step(2, view=2)
    b.step(3, view=2, change=changed(3, 0, None, result="x"))
    b.step(2, view=3)  # back to an earlier checkpoint
    b.step(3, view=3)
    b.close()
    assert compared(a, tmp_path / "b") is None


def test_of_two_files_with_one_rank_that_of_the_later_view_counts(tmp_path: Path) -> None:
    """worker-1 is lost in step 2; worker-9 takes its place in view 2, and has no file of step 1."""
    a = script(tmp_path / "a")
    b = Scripted(tmp_path / "b")
    b.step(1)
    b.step(2, change=changed(2, 0, None, result="given up"))
    b.logs[1] = AuditLog(audit_file(tmp_path / "b", "worker-9"), job="test", node="worker-9")
    b.step(2, view=2)
    b.step(3, view=2)
    assert diff(load_run(a), load_run(tmp_path / "b")).verdict == "equal"


def test_a_rank_that_has_no_part_in_the_attempt_that_counts_does_not_count(tmp_path: Path) -> None:
    """Rank 2 is lost in step 2, and two ranks go on: their step 2 is that of a run of two ranks."""
    for name, world in (("a", 3), ("b", 2)):
        run = Scripted(tmp_path / name, world=world)
        run.step(1)
        if world == 3:
            run.step(2, change=changed(2, 0, None, result="given up"))
            run.world = 2
            run.logs.pop()
        run.step(2, view=2)
        run.close()
    found = diff(load_run(tmp_path / "a"), load_run(tmp_path / "b"))
    assert (found.verdict, found.gaps) == ("equal", ())


def test_what_a_latecomer_calls_outside_of_steps_stands_where_the_others_have_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = Scripted(tmp_path / name)
        run.step(1)
        if name == "b":
            run.logs[1] = AuditLog(audit_file(tmp_path / name, "worker-9"), job="test", node="worker-9")
        for rank, log in enumerate(run.logs):
            log.record(record(None, rank, view=2))
        run.step(2, view=2)
        run.close()
    assert diff(load_run(tmp_path / "a"), load_run(tmp_path / "b")).verdict == "equal"


def test_calls_outside_of_steps_have_a_place_of_their_own(tmp_path: Path) -> None:
    for name, result in (("a", "r"), ("b", "x")):
        log = AuditLog(audit_file(tmp_path / name, "worker-0"), job="test", node="worker-0")
        log.record(record(None, 0, world=1))
        log.begin(step=1, view=1, rank=0, world=1)
        log.record(record(1, 0, world=1))
        log.record(record(None, 0, world=1, seq=1, result=result))
        log.close()
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found is not None
    assert str(found).startswith("after step 1, outside of any, call 0, rank 0: equal inputs gave another result")


# ---------------------------------------------------------------------------------------------------------------------
# Nobody is blamed without proof


def differ(
    tmp_path: Path, a: dict[int, list[OperationRecord]], b: dict[int, list[OperationRecord]], **how: Any
) -> Difference | None:
    return compared(wrote(tmp_path / "a", a, **how), wrote(tmp_path / "b", b, **how))


def test_other_terms_are_other_calls_and_no_fault_of_the_result(tmp_path: Path) -> None:
    def run(color: int) -> dict[int, list[OperationRecord]]:
        return {
            rank: [record(1, rank, op="split", inputs=(), terms=f"color={color * rank} key=0", result=f"table{color}")]
            for rank in range(2)
        }

    found = differ(tmp_path, run(0), run(1))
    assert found is not None
    assert (found.kind, found.rank) == ("calls", (1, 1))
    assert (found.a, found.b) == ("split color=0 key=0 in group world", "split color=1 key=0 in group world")


def test_another_number_of_leaves_is_no_fault_of_the_result(tmp_path: Path) -> None:
    def run(leaves: int) -> dict[int, list[OperationRecord]]:
        inputs = tuple((leaf, f"in{leaf}") for leaf in range(leaves))
        return {0: [record(1, 0, world=1, inputs=inputs, result=f"sum of {leaves}")]}

    found = differ(tmp_path, run(3), run(2), world=1)
    assert found is not None
    assert (found.kind, found.leaf, found.a, found.b) == ("inputs", 2, "in2", "nothing")
    assert "rank 0: only one run has leaf 2" in str(found)


def test_a_result_is_blamed_only_where_what_all_ranks_gave_is_known(tmp_path: Path) -> None:
    def run(result: str) -> dict[int, list[OperationRecord]]:
        return {rank: [record(1, rank, result=result)] for rank in range(2)}

    a, b = run("r"), run("x")
    for ranks, kind in (((0, 1), "result"), ((0,), "unexplained")):
        where = tmp_path / kind
        found = differ(where, {rank: a[rank] for rank in ranks}, b)
        assert found is not None
        assert (found.kind, found.rank, found.a, found.b) == (kind, (0, 0), "r", "x")
    found = compared(tmp_path / "result/a/worker-1.audit", tmp_path / "result/b/worker-1.audit")
    assert found is not None
    assert str(found).startswith("step 1, call 0, rank 1: another result, but not all inputs are there to be compared")


@pytest.mark.parametrize("members", [0, 2])
def test_a_line_that_only_one_rank_has_proves_nothing(tmp_path: Path, members: int) -> None:
    """As when the other rank counts the call to the step before, or its machine lost power."""

    def run(result: str) -> dict[int, list[OperationRecord]]:
        return {0: [record(1, 0, result=result, members=members)], 1: []}

    found = differ(tmp_path, run("r"), run("x"), world=3 if members else 2)
    assert found is not None
    assert found.kind == "unexplained"


def test_what_was_sent_is_named_before_what_was_received_wherever_the_calls_stand(tmp_path: Path) -> None:
    """Rank 0 receives with its first call what rank 1 sends with its third."""
    send = {"op": "send float32 (3) from 1 to 0", "members": 2, "agreed": False}

    def run(sent: str) -> dict[int, list[OperationRecord]]:
        barriers = [record(1, 1, group="0:1", seq=seq, op="barrier", inputs=(), result="") for seq in range(2)]
        return {
            0: [record(1, 0, inputs=(), result=sent, **send)],
            1: [*barriers, record(1, 1, inputs=((1, sent),), result="", **send)],
        }

    found = differ(tmp_path, run("r"), run("x"))
    assert found is not None
    assert (found.kind, found.index, found.rank) == ("inputs", 2, (1, 1))


def test_what_follows_from_another_difference_is_not_named_before_it(tmp_path: Path) -> None:
    """Rank 1 gets something else in its group, with its second call, and so gives something else to rank 0's first."""

    def run(got: str) -> dict[int, list[OperationRecord]]:
        own = {"group": "0:1", "members": 2}
        third = record(1, 1, inputs=((1, f"from {got}"),), result=f"sum of {got}")
        return {
            0: [record(1, 0, result=f"sum of {got}")],
            1: [record(1, 1, op="barrier", inputs=(), result="", **own), record(1, 1, seq=1, result=got, **own), third],
            2: [record(1, 2, op="barrier", inputs=(), result="", **own), record(1, 2, seq=1, result=got, **own)],
        }

    found = differ(tmp_path, run("r"), run("x"), world=3)
    assert found is not None
    assert (found.kind, found.index, found.rank) == ("result", 1, (1, 1))


def test_operations_that_ranks_issued_in_opposite_order_are_compared_too(tmp_path: Path) -> None:
    def run(last: str) -> dict[int, list[OperationRecord]]:
        return {
            rank: [record(1, rank, group=group, result=f"{group} {last}") for group in ("x", "y", "z")[:: 1 - 2 * rank]]
            for rank in range(2)
        }

    assert differ(tmp_path / "equal", run("r"), run("r")) is None
    found = differ(tmp_path / "other", run("r"), run("s"))
    assert found is not None
    assert found.kind == "result"


def test_a_sub_group_of_the_same_name_and_other_members_is_another_call(tmp_path: Path) -> None:
    def run(partner: int) -> dict[int, list[OperationRecord]]:
        group = {"group": "0:0", "members": 2, "result": f"sum with {partner}"}
        return {rank: [record(1, rank, **group)] if rank in (0, partner) else [] for rank in range(3)}

    found = differ(tmp_path, run(1), run(2), world=3)
    assert found is not None
    assert (found.kind, found.rank, found.b) == ("missing", (1, 1), "nothing")


# ---------------------------------------------------------------------------------------------------------------------
# Other world sizes


def of_world(directory: Path, world: int, first: list[dict[str, Any]], *, leaf: str = "in") -> Path:
    """One step: operations with the given fields, called by all ranks, and then a reduction of two shards, both held by
    the last rank. A field may be a function of the rank."""

    def fields(rank: int, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value(rank) if callable(value) else value for name, value in given.items()}

    shards = {"inputs": lambda rank: ((0, "in"), (1, leaf)) if rank == world - 1 else ()}
    calls = [*first, shards]
    ranks = {
        rank: [record(1, rank, world=world, seq=seq, **fields(rank, given)) for seq, given in enumerate(calls)]
        for rank in range(world)
    }
    return wrote(directory, ranks, world=world)


def parts(world: int) -> list[dict[str, Any]]:
    """Operations whose inputs or results are another thing at another world size."""

    def mine(rank: int) -> tuple[tuple[int, str], ...]:
        return ((rank, f"part {rank} of {world}"),)

    def held(rank: int) -> tuple[tuple[int, str], ...]:
        return ((0, "a"), (1, "b")) if rank == 0 else ()

    given = [
        {"op": "all_gather float32 (n)", "inputs": mine},
        {"op": "all_gather_object", "inputs": mine},
        {"op": "split", "inputs": (), "terms": lambda rank: f"color={rank % world} key=0"},
        {"op": SUM, "inputs": mine},
        {"op": f"{SUM} ring", "inputs": held, "terms": f"world={world}"},
        {"op": GATHER, "inputs": lambda rank: ((0, "all"),) if rank == 0 else (), "agreed": False},
        {"op": "reduce_scatter float32 (3) sum default", "inputs": held, "terms": f"counts={world}", "agreed": False},
    ]
    if world > 1:
        given.append({"group": "0:0", "members": world - 1, "inputs": mine})
    return [{"result": f"{each.get('op', SUM)} at {world}", **each} for each in given]


def test_what_means_nothing_at_another_world_size_is_put_apart_and_hides_nothing(tmp_path: Path) -> None:
    a, b = of_world(tmp_path / "a", 2, parts(2)), of_world(tmp_path / "b", 3, parts(3))
    found = diff(load_run(a), load_run(b))
    assert (found.difference, found.verdict, found.apart, found.operations) == (None, "no difference", 8, 9)
    found = diff(load_run(a), load_run(of_world(tmp_path / "c", 3, parts(3), leaf="other")))
    assert found.difference is not None
    assert (found.difference.kind, found.difference.leaf, found.difference.rank) == ("inputs", 1, (1, 2))
    assert diff(load_run(a), load_run(of_world(tmp_path / "again", 2, parts(2)))).verdict == "equal"


@pytest.mark.parametrize("at", range(8))
def test_each_of_these_is_compared_at_the_same_world_size(tmp_path: Path, at: int) -> None:
    other = parts(3)
    other[at]["result"] = "x"
    a, b = of_world(tmp_path / "a", 3, parts(3)), of_world(tmp_path / "b", 3, other)
    found = compared(a, b)
    assert found is not None
    assert (found.index, found.b) == (at, "x")
    assert found.kind == ("result" if at < 7 else "unexplained")  # three ranks claim to be in a group of two


def test_other_calls_of_all_ranks_are_named_at_any_world_size(tmp_path: Path) -> None:
    a = of_world(tmp_path / "a", 2, [])
    found = compared(a, of_world(tmp_path / "b", 3, [{"op": "barrier", "inputs": (), "result": ""}]))
    assert found is not None
    assert (found.kind, found.index, found.a, found.b) == (
        "calls",
        0,
        f"{SUM} in group world",
        "barrier in group world",
    )
    found = compared(of_world(tmp_path / "c", 3, [{"op": SUM, "inputs": ()}]), a)
    assert found is not None
    assert (found.kind, found.index, found.rank, found.b) == ("missing", 1, (0, None), "nothing")


def test_runs_that_have_nothing_in_common_are_not_said_not_to_differ(tmp_path: Path) -> None:
    def run(world: int) -> Path:
        return wrote(tmp_path / str(world), {r: [record(1, r, world=world)] for r in range(world)}, world=world)

    found = diff(load_run(run(2)), load_run(run(3)))
    assert (found.verdict, found.apart) == ("incomplete", 1)
    assert "the runs have no leaves in common" in found.gaps[0]


# ---------------------------------------------------------------------------------------------------------------------
# What is not there


def test_a_rank_without_a_file_is_missed(tmp_path: Path) -> None:
    a, b = script(tmp_path / "a"), script(tmp_path / "b")
    (b / "worker-1.audit").unlink()
    for runs in ((a, b), (b, a), (b, b)):
        found = diff(*map(load_run, runs))
        assert (found.difference, found.verdict) == (None, "incomplete")
    assert load_run(b).gaps == ("nothing of rank 1 in 3 of 3 places, first in step 1",)
    other = script(tmp_path / "other", change=changed(3, 0, 0, inputs=((0, "x"), (1, "in3.0.1"))))
    found = diff(load_run(other), load_run(b))
    assert found.verdict == "different"
    assert found.difference is not None
    assert (found.difference.kind, found.difference.rank) == ("inputs", (0, 0))


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_damaged_file_may_have_lost_is_neither_equal_nor_missing(tmp_path: Path, world: int) -> None:
    a, b = (script(tmp_path / name, world=world) for name in "ab")
    file = b / f"worker-{world - 1}.audit"
    whole = file.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole), 13):
        file.write_bytes(whole[:cut])
        if whole[cut - 1 : cut] == b"\n":
            continue
        for runs in ((a, b), (b, a), (b, b)):
            found = diff(*map(load_run, runs))
            assert found.difference is None, str(found.difference)
            assert found.verdict == "incomplete"


def test_files_that_are_not_of_one_run_are_refused(tmp_path: Path) -> None:
    def add(directory: Path, name: str, *, job: str = "test", node: str = "", rank: int = 0, world: int = 2) -> None:
        log = AuditLog(audit_file(directory, name), job=job, node=node or name)
        log.begin(step=1, view=1, rank=rank, world=world)
        log.close()

    for reason, how in (
        ("it has files of several jobs, test and other", {"job": "other", "rank": 2}),
        ("worker-0.audit and x.audit are both of node worker-0", {"node": "worker-0"}),
        ("worker-1.audit and x.audit are both of rank 1 in view 1", {"rank": 1}),
        ("in view 1 the world has 2 ranks by worker-0.audit and 3 by x.audit", {"rank": 2, "world": 3}),
    ):
        directory = script(tmp_path / reason.replace(" ", "")[:30], steps=1)
        add(directory, "x", **how)
        with pytest.raises(AuditError, match=reason):
            load_run(directory)


def test_files_of_different_ranks_have_nothing_to_compare(tmp_path: Path) -> None:
    a = script(tmp_path / "a", steps=1)
    found = diff(load_run(a / "worker-0.audit"), load_run(a / "worker-1.audit"))
    assert found.verdict == "incomplete"
    assert found.gaps == ("step 1: A has rank 0, B has rank 1, and none is in both",)


def test_two_runs_that_did_nothing_are_not_called_equal(tmp_path: Path) -> None:
    a = wrote(tmp_path / "a", {0: [], 1: []})
    found = diff(load_run(a), load_run(a))
    assert (found.verdict, found.gaps) == ("incomplete", ("A: no call is recorded", "B: no call is recorded"))


# ---------------------------------------------------------------------------------------------------------------------
# The command


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int) or ended.value.code is None
    return ended.value.code or 0


def test_the_command_names_the_difference_and_says_so_in_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = script(tmp_path / "a"), script(tmp_path / "b", change=changed(2, 1, 0, result="other"))
    assert run("audit", "diff", str(a), str(a)) == 0
    assert capsys.readouterr().out == "equal: 3 steps, 12 calls in A, 12 in B\n"
    assert run("audit", "diff", str(a), str(b)) == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "step 2, call 1, rank 0: equal inputs gave another result",
        f"  {SUM}",
        "  A: out2.1",
        "  B: other",
    ]
    assert run("audit", "diff", "--json", str(a), str(b)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False
    assert found["difference"]["place"] == {"step": 2, "outside": False}
    assert found["runs"][0]["last_step"] == 3
    assert (found["verdict"], found["operations"]) == ("different", 3)


def test_the_command_says_equal_only_of_whole_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = script(tmp_path / "a"), script(tmp_path / "b")
    assert run("audit", "diff", str(a / "worker-1.audit"), str(b / "worker-1.audit")) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "no difference: 3 steps, 6 calls in A, 6 in B",
        "  A is the file of rank 1 alone",
        "  B is the file of rank 1 alone",
    ]
    assert err == ""
    assert run("audit", "diff", *(str(of_world(tmp_path / str(world), world, parts(world))) for world in (2, 3))) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no difference: 1 steps, 18 calls in A, 27 in B",
        "  8 of 9 operations could not be compared, or not whole: what they give depends on the world size",
    ]
    (b / "worker-1.audit").unlink()
    assert run("audit", "diff", str(a), str(b)) == 2
    out, err = capsys.readouterr()
    assert out == "incomplete: no difference in what is there: 3 steps, 12 calls in A, 6 in B\n"
    assert err == "B: nothing of rank 1 in 3 of 3 places, first in step 1\n"
    assert run("audit", "diff", "--json", str(a), str(b)) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["verdict"], found["gaps"]) == (False, "incomplete", [err.strip()])


def test_the_command_says_which_file_is_damaged_and_fails_on_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = script(tmp_path / "a")
    with open(a / "worker-1.audit", "ab") as file:
        file.write(b"half a li")
    assert run("audit", "diff", str(a), str(a)) == 2
    assert "A: worker-1.audit is good up to its line 10 and not after" in capsys.readouterr().err
    assert run("audit", "diff", str(a), str(tmp_path / "none")) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_command_shows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = script(tmp_path / "a", steps=1)
    assert run("audit", "show", str(a)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 1: ranks 0, 1 of 2",
        f"  0  {SUM}  group world  result out1.0",
        f"  1  {SUM}  group world  result out1.1",
    ]
    assert run("audit", "show", "--json", str(a)) == 0
    assert json.loads(capsys.readouterr().out)["calls"] == 4
