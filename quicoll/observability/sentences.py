"""Events in words, one sentence each, for the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["sentence"]

_SENTENCES = {
    "listening": "listens at {address}",
    "node_joined": "{peer} has connected",
    "view_proposed": "proposes view {view} of {nodes}",
    "view_ended": "view {view} is over: {cause}",
    "step_committed": "step {step} is committed",
    "step_aborted": "step {step} was not committed: {cause}",
    "held": "waits: {cause}",
    "leads": "leads the job, by a lease with the token {token}; the job's seed is {seed}",
    "stands_by": "stands by again: {cause}",
    "state_received": "has the state after step {step} from rank {from_rank}",
    "state_learning": "learns the state from {from_node}, {chunks} chunks, before it takes part",
    "shards_received": "has got {blocks} blocks of what is divided between the ranks",
    "standing_by": "stands by as a spare, and learns from {from_node!r}",
    "progress": "is at step {step}: {step_s:.4f} s a step, {communication_share:.0%} of it communication",
    "refused": "is refused by the coordinator: {reason}",
    "tiers_changed": "goes over to version {version} of the tiers: active are {active}",
    "tiers_refused": "version {version} of the tiers, proposed by {nodes}, is refused: {reason}",
    "piece_refused": "takes a piece of {state} from {peer} no more: {reason}",
    "straggler": "rank {rank} ({peer}) called {op} {seconds:.3f} s after most",
    "certificates_rotated": "shows the certificate sha256={fingerprint} from now on",
    "certificate_denied": "lets the certificate sha256={fingerprint} in no more",
    "flight_unwritten": "cannot write down what happened last: {reason}",
    "metrics_served": "serves its figures at http://{address}/metrics",
    "job_done": "the job is done, at step {step}",
    "state_handed": "begins with the state of {from_node}; {nodes} had another one, first in {tensor}",
    "state_torn": "has a state that is half overwritten, of step {step}: {cause}",
    "own_state_kept": "keeps {names} as after step {own_step}; the rest of the state is that after step {step}",
    "nodes_forgotten": "gives up {nodes}, as an operator asked",
    "scale_asked": "is asked for {world_size} ranks",
    "node_dismissed": "tells {peer} to leave: {cause}",
    "node_released": "lets {peer} go, which was asked to stop",
    "dismissed": "was told to leave, and has: {reason}",
    "fault": "fault: {what}",
}


def sentence(kind: str, fields: Mapping[str, Any]) -> str:
    """Return an event in words, without the node that it is of.

    Args:
        kind: As in `quicoll.Event`.
        fields: The kind's fields.
    """
    told = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in fields.items()}
    try:
        match kind:
            case "listening" if "seed" in told:
                return "listens at {address}; the job's seed is {seed}".format_map(told)
            case "view_installed" if "rank" in told:
                return "rank {rank} of {world_size} in view {view}: {nodes}".format_map(told)
            case "view_installed":
                return "view {view} is at work, {world_size} ranks: {nodes}".format_map(told)
            case "shared_memory":
                way = (
                    "hand each other what they can through memory"
                    if told["used"]
                    else f"use the network: {told['reason']}"
                )
                return f"the ranks of view {told['view']} {way}"
            case "path_changed":
                return "{peer} is reached at {address} from now on, and was at {before}".format_map(told)
            case "lane_used":
                return "lane {lane}, from {address}, carries long messages to {peer} in view {view}".format_map(told)
            case "lane_shut":
                return (
                    "lane {lane} to {peer} is shut in view {view}, its messages go over the link: {reason}".format_map(
                        told
                    )
                )
            case "lane_lost":
                return "lane {lane} of this rank is lost: {reason}".format_map(told)
            case "state_differs":
                text = "{nodes} had another state than most after step {step}, first in {tensor}".format_map(told)
                healed = (
                    f"; {told['from_node']} hands them its own"
                    if told["from_node"]
                    else "; nobody knows which is right"
                )
                return text + healed
            case "state_learned":
                text = "has learned {chunks} chunks of the state in {seconds:.1f} s".format_map(told)
                return f"{text}, and no more: {told['cause']}" if told["cause"] else text
            case "peer_lost" if told.get("left"):
                return str(told["cause"])
            case "peer_lost":
                return "lost {peer}: {cause}".format_map(told)
        return _SENTENCES[kind].format_map(told)
    except (KeyError, ValueError):  # one of the transport's, or a user's own
        return " ".join([kind.replace("_", " "), *(f"{name}={value}" for name, value in told.items())])
