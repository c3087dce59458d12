"""Entry point of the `quicoll` command: exit status 0, or 2 with one line on stderr that says what to do.

It imports nothing that an extra brings until it runs, so that a plain install answers with a hint, not a traceback.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from quicoll.errors import QuicollError
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command with `argv` (without the program's name; None takes the process's own) and exit.

    Errors of quicoll become one line on stderr and exit status 2. Any other exception is a fault in quicoll and keeps
    its traceback.
    """
    try:
        import rich  # noqa: F401  typer falls back to plain text without it, our live tables cannot
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        _fail(f"the command needs {error.name}: pip install 'quicoll[cli]'")
    from quicoll.cli.app import app

    try:
        app(args=None if argv is None else list(argv), prog_name="quicoll")
    except (QuicollError, TransportError) as error:
        _fail(str(error))
    sys.exit(0)


def _fail(message: str) -> NoReturn:
    # One line, whatever a path or a peer put into the message: logs are read by line.
    sys.stderr.write(f"quicoll: {' '.join(message.split())}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
