"""A fuzzer of live endpoints: real endpoints, real QUIC and TLS, a network in memory and a clock that jumps.

`virtual` has the loop and the network, `mutate` the operators, `hostile` a peer that dials or is dialled, has a
certificate or not, and says whatever it likes; `world` the settings, `episode` one run against a fresh world with its
oracle. `python -m quicoll_fuzz` runs many. Nothing waits for real time, and every source of chance is seeded, so that
`--seed S --episode N` repeats an episode, to the byte.
"""
