"""`quicoll bench`: how fast this is here, and how fast others are, pair by pair in one run."""
