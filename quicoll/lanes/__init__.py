"""Lanes: processes beside a rank's own that carry its long messages, each with an endpoint and a processor of its own.

What encrypts, makes packets and talks to the kernel takes Python's lock from whatever the rank computes, and is one
processor's work. The engine (quicoll.engine.lanes) keeps views, calls, short messages and the deadlines; a long
payload it copies into memory that it shares with a lane, which sends it to the lane of the same number of the peer.
Where that is not to be had it goes over the link, as ever: a lane is never needed.

    orders      what engine and lane tell each other, as data
    memory      the payloads' places
    worker      a lane, from its orders to its links
    line        the socket between engine and lane
    process     the lane's process
    starting    the engine's side of that
"""
