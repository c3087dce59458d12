"""Which process this is, after a fork as before."""

from __future__ import annotations

import os

import pytest

from quicoll import forks


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_child_of_a_fork_knows_that_it_is_another_process() -> None:
    assert forks.pid == os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(forks.pid).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert int(said.read()) == child
    assert os.waitpid(child, 0)[1] == 0
    assert forks.pid == os.getpid()
