"""quicoll's errors in torch programs."""

from __future__ import annotations

import copy
from multiprocessing.reduction import ForkingPickler

import pytest

pytest.importorskip("torch")

from torch.distributed import DistBackendError

from quicoll import LocalError, PeerError
from quicoll.errors import JobDone
from quicoll.torch_backend.failures import CLOSED, add_words, for_torch, milliseconds, refused, say_as_gloo


def test_an_error_is_quicolls_and_torchs_with_all_that_it_says() -> None:
    error = PeerError("lost", rank=1, node="worker-1", view=3, op="all_reduce#2", lost=("worker-1",))
    error.__cause__ = cause = ValueError("seen here")
    made = for_torch(error)
    assert isinstance(made, PeerError)
    assert isinstance(made, DistBackendError)
    assert isinstance(made, RuntimeError)
    assert str(made) == str(error)
    assert (made.rank, made.node, made.view, made.op, made.lost) == (1, "worker-1", 3, "all_reduce#2", ("worker-1",))
    assert type(made).__name__ == "PeerError"
    assert made.__cause__ is cause


def test_an_error_goes_to_another_process_with_all_that_it_says() -> None:
    plain = PeerError("lost", rank=1, node="worker-1", view=3, op="all_reduce#2", lost=("worker-1",))
    error = for_torch(plain)
    for found in (ForkingPickler.loads(ForkingPickler.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert str(found) == str(plain)
        assert vars(found) == vars(plain)


def test_words_that_programs_look_for_come_behind_what_is_said() -> None:
    error = PeerError("worker-1 was lost", rank=1, lost=("worker-1",))
    add_words(error, CLOSED)
    add_words(error, CLOSED)  # several operations may have failed by one error
    assert str(error) == "worker-1 was lost (rank=1). Connection closed by peer"
    assert error.message == "worker-1 was lost"
    silent = KeyError()
    add_words(silent, CLOSED)
    assert silent.args == ()


def test_each_raise_has_an_object_of_its_own() -> None:
    error = LocalError("no")
    assert for_torch(error) is not for_torch(error)
    assert type(for_torch(error)) is type(refused("other"))
    assert isinstance(refused("other"), ValueError)


def test_what_is_no_error_of_ours_stays_as_it_is() -> None:
    for error in (KeyError("x"), KeyboardInterrupt(), JobDone("done", step=1)):
        assert for_torch(error) is error
    made = refused("twice")
    assert for_torch(made) is made


def test_times_are_said_in_milliseconds_at_least_one() -> None:
    assert [milliseconds(each) for each in (1800.0, 1.5, 0.0001)] == ["1800000ms", "1500ms", "1ms"]


def test_a_barrier_that_ends_by_another_failure_names_no_absent_rank() -> None:
    error = PeerError("worker-1 was lost", rank=1, node="worker-1", lost=("worker-1",))
    say_as_gloo(error, rank=0, within=2.0, every=True)
    assert str(error).startswith("Rank 0 timed out in monitoredBarrier: worker-1 was lost")
    assert error.message == "worker-1 was lost"
