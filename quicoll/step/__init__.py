"""One atomic step: `context` is what its user holds, `protocol` this rank's side of it, `attempt` is between them."""
