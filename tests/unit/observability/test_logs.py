"""What is logged at which level, and how it is heard where a program does nothing about logging."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from quicoll import Config, LocalError
from quicoll.observability.events import Observers
from quicoll.observability.logs import LOG_LEVELS, level_of_event


def test_each_kind_of_event_has_the_level_that_it_means(caplog: pytest.LogCaptureFixture) -> None:
    observers = Observers("a", lambda: 1)
    with caplog.at_level(logging.DEBUG, logger="quicoll"):
        observers.emit("step_committed", step=1, view=1)
        observers.emit("step_aborted", step=2, view=1, cause="x", lost=[])
        observers.emit("flight_unwritten", reason="full")
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("quicoll.events", "DEBUG"),
        ("quicoll.events", "INFO"),
        ("quicoll.events", "WARNING"),
    ]
    last = vars(caplog.records[-1])
    assert (last["node"], last["kind"], last["fields"]) == ("a", "flight_unwritten", {"reason": "full"})


def test_what_happens_at_each_connection_is_for_who_looks_for_it() -> None:
    from quicoll.observability.transport import TRANSPORT_KINDS

    seldom = {kind for kind in TRANSPORT_KINDS.values() if level_of_event(kind) > logging.DEBUG}
    assert seldom == {"peer_refused", "payload_corrupted"}


def test_the_setting_has_the_words_of_the_levels() -> None:
    assert Config.resolve(environ={"QUICOLL_LOG": "INFO"}, listen="127.0.0.1:0").log == "info"
    assert Config.resolve(environ={}, listen="127.0.0.1:0").log is None
    with pytest.raises(LocalError, match="debug, info, warning, error"):
        Config.resolve(environ={}, listen="127.0.0.1:0", log="loud")
    assert sorted(LOG_LEVELS.values()) == list(LOG_LEVELS.values())


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["no handler", "a handler of the program's"])
def test_it_is_heard_on_stderr_unless_the_program_has_a_handler(own: bool) -> None:
    program = (
        "import logging, sys\n"
        "from quicoll.observability.logs import hear\n"
        "if sys.argv[1] == 'True': logging.basicConfig(stream=sys.stdout, format='own %(message)s')\n"
        "hear('info')\n"
        "hear('info')\n"
        "logging.getLogger('quicoll.events').info('here')\n"
        "logging.getLogger('quicoll.events').debug('not here')\n"
        "logging.getLogger('others').info('nor this')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(own)], capture_output=True, text=True, check=True)
    if own:
        assert (ran.stdout, ran.stderr) == ("own here\n", "")
    else:
        assert ran.stdout == ""
        assert ran.stderr.endswith(" INFO quicoll.events: here\n")
        assert ran.stderr.count("\n") == 1
