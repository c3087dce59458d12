"""What a worker promises is held by tests that bite: each finds the code that is broken on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from named_tests import run_named
from worker_mutants import WORKER_MUTANTS

from quicoll.errors import QuicollError

if TYPE_CHECKING:
    from named_tests import Below

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("mutant", WORKER_MUTANTS, ids=lambda mutant: mutant.change.__name__)
def test_the_named_test_fails_with_the_mutant_and_passes_without(
    mutant: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_named(mutant)
    mutant.change(monkeypatch)
    with pytest.raises((AssertionError, QuicollError, pytest.fail.Exception)):
        run_named(mutant)
