"""The self-check refuses an aioquic of which a private part is gone, or means something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic.connection import QuicConnection

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.quic import check_foundation, handshake

Replace = Callable[[Any, str, Any], None]


def initialize_is_called_otherwise(replace: Replace) -> None:
    replace(handshake._Connection, "_initialize", QuicConnection._initialize)


def keys_do_not_pass_the_callback(replace: Replace) -> None:
    """Only what aioquic itself sets first counts."""
    first = property(
        lambda self: self.__dict__["first"],
        lambda self, value: self.__dict__.update(first=self.__dict__.get("first") or value),
    )
    replace(tls.Context, "update_traffic_key_cb", first)


def the_state_is_kept_elsewhere(replace: Replace) -> None:
    def hidden(self: Any) -> None:
        raise AttributeError("_state")

    replace(handshake._Connection, "is_draining", property(hidden))


def the_certificate_is_kept_elsewhere(replace: Replace) -> None:
    replace(tls.Context, "_set_peer_certificate", lambda self, certificate: delattr(self, "_peer_certificate"))


def the_flag_means_nothing(replace: Replace) -> None:
    flag = property(lambda self: False, lambda self, value: None)
    replace(tls.Context, "_request_client_certificate", flag)


def test_this_foundation_is_as_expected() -> None:
    check_foundation.__wrapped__()


@pytest.mark.parametrize(
    "change",
    [
        initialize_is_called_otherwise,
        keys_do_not_pass_the_callback,
        the_state_is_kept_elsewhere,
        the_certificate_is_kept_elsewhere,
        the_flag_means_nothing,
    ],
)
def test_a_foundation_that_is_built_otherwise_is_refused(
    change: Callable[[Replace], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(lambda owner, name, value: monkeypatch.setattr(owner, name, value, raising=False))
    with pytest.raises(ConfigurationError, match=r"aioquic .*(is not built as expected|does not show the certificate)"):
        check_foundation.__wrapped__()
