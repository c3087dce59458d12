"""Datagrams between two endpoints that cannot send to each other, passed on by a third one.

    wire           what a datagram to and from a relay looks like; the addresses that stand for a way through one
    table          the relay's side without IO: who asks for whom, what is passed on, and how much of it
    forwarding     the relay's socket: takes what is to be passed on out of what its endpoint receives
    detour         the other side's socket: what is sent to such an address goes through the relay

A relay is an endpoint with links to both. It passes on QUIC datagrams of a connection between the two, which it has no
key for: it can lose, delay, repeat and count them, as anybody on a path can, and neither read nor alter what they say.
Who asks a relay for what is said on its links, by messages of the layer above.

What it passes on, and for whom:

- A *label* of eight random bytes names one direction of a pair at one relay, "from A to B". A has asked for B over its
  link and got the label; nobody else knows it. B has another one for the way back.
- What A sends under its label goes to B under B's label, if B has asked for A too: nobody is sent anything by a node
  that it has not asked for.
- It has to come from where A's link shows A to be, and goes to where B's link shows B to be, proved by an answer from
  there. So a stranger who has seen a label cannot use it from elsewhere, nothing is sent to who has not shown its
  address, and a member cannot make the relay send to a stranger.
- One datagram out for each one in, of the same size: nothing is amplified. The relay answers nothing by itself.
- Bytes of each direction and of all together are bounded per second (`RelayLimits`); what exceeds that is lost, and
  QUIC slows down. So are the nodes that one node may ask for. All that is known of a node goes with its link.

Failure cases. A relay that ends takes the connections through it along: they are lost by silence, like any other. One
that starts anew knows no labels; what comes under an old one is lost. A node whose address changes is not passed on to
until QUIC has validated the new one, a round trip.
"""
