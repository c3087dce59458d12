"""The endpoint's sans-IO core: datagrams, look-ups and the time in, what is to be done out. The shell carries it out.

endpoint     EndpointCore: who owns what, and the entry points
traffic      connections at work, and their ends
greeting     from a connection of nobody to one of a link
admission    who comes in: the rules of gate, guard, authentication and Hello
dialling     which address is tried next, and when again
failover     a silent connection of a link gives way to one by another path
dial_plan    the order in which a peer's addresses are dialled
table        which connections there are, and which one carries each link
connection   a carrier and what the endpoint knows of it
peer         a link and what the endpoint knows of its peer
agenda       when to look at what again
terms        what core and shell say to each other
"""
