"""Messages between authenticated peers over QUIC: checked, resent, resumed, with a deadline on every wait."""
