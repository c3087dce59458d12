"""Ranks of one host: what they hand each other through shared memory.

`memory` has the memory of a rank and what it promises, `small` and `large` the protocols in it, `meeting` the way in
which ranks come to each other's memory. Nothing here knows of an event loop; the engine does
(quicoll.engine.neighbourhood, quicoll.engine.neighbours).
"""
