"""Entry point of the `quicoll` command.

    exit status   0 done; 1 what a command found (`quicoll COMMAND --help`); 2 an error, with one line on stderr that
                  says what to do; 128 + number of the signal that ended it, with one line too

It imports nothing that an extra brings until it runs, so that a plain install answers with a hint, not a traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from quicoll.errors import QuicollError
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_NOWHERE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors that a write to standard output may meet. A pipe whose reader is gone is typer's to handle."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command with `argv` (without the program's name; None takes the process's own) and exit.

    Errors of quicoll become one line on stderr and exit status 2. Any other exception is a fault in quicoll and keeps
    its traceback.
    """
    try:
        import rich  # noqa: F401 - typer falls back to plain text without it, our live tables cannot
        import typer  # noqa: F401 - is it there?
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        _fail(f"the command needs {error.name}: pip install 'quicoll[cli]'")
    try:
        from quicoll.cli.app import app

        app(args=None if argv is None else list(argv), prog_name="quicoll")
    except (QuicollError, TransportError) as error:
        _fail(str(error))
    except KeyboardInterrupt:  # while it was still importing: `app` knows what to do with later ones
        _fail("ended by SIGINT", status=128 + signal.SIGINT)
    except OSError as error:
        if error.filename is not None or error.errno not in _NOWHERE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would fail once more with what it has buffered
        _fail(f"cannot write the output: {error.strerror}")
    sys.exit(0)


def _fail(message: str, *, status: int = 2) -> NoReturn:
    # One line, also where a path or a peer put a line break into the message: logs are read by line.
    sys.stderr.write(f"quicoll: {' '.join(message.split())}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
