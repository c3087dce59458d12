"""Messages of any size between authenticated peers, on QUIC: exactly once, checked end to end, with deadlines."""
