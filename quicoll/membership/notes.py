"""What the coordinator's core notes, as events for observers (`quicoll.Event`)."""

from __future__ import annotations

from typing import Any, Protocol

from quicoll.membership.coordinator.actions import (
    JobFinished,
    MembershipEvent,
    NodeDismissed,
    NodeJoined,
    NodeLost,
    NodeReleased,
    NodesForgotten,
    ScaleAsked,
    StepCommitted,
    StepRejected,
    ViewAborted,
    ViewInstalled,
    ViewProposed,
    ViewWithheld,
)

__all__ = ["Emitter", "emit_note"]


class Emitter(Protocol):
    """Takes events; `Observers` is one."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Take one in."""


def emit_note(event: MembershipEvent, observers: Emitter) -> None:
    """Tell observers what happened.

    Args:
        event: What the core has noted.
        observers: Those to tell.
    """
    emit = observers.emit
    match event:
        case NodeJoined():
            emit("node_joined", peer=event.node, incarnation=event.incarnation)
        case NodeLost():
            emit("peer_lost", peer=event.node, cause=event.cause, left=event.left)
        case NodesForgotten():
            emit("nodes_forgotten", nodes=list(event.nodes))
        case NodeDismissed():
            emit("node_dismissed", peer=event.node, cause=event.cause)
        case NodeReleased():
            emit("node_released", peer=event.node)
        case ScaleAsked():
            emit("scale_asked", world_size=event.world_size, leave=list(event.leave))
        case ViewProposed():
            emit("view_proposed", view=event.view.view_id, nodes=list(event.view.nodes))
        case ViewInstalled():
            emit(
                "view_installed",
                view=event.view.view_id,
                world_size=event.view.world_size,
                nodes=list(event.view.nodes),
            )
        case ViewAborted():
            emit("view_ended", view=event.view_id, cause=event.cause, lost=list(event.lost))
        case StepCommitted():
            emit("step_committed", step=event.step, view=event.view_id)
        case StepRejected():
            emit("step_aborted", step=event.step, view=event.view_id, cause=event.cause, lost=list(event.lost))
        case ViewWithheld():
            emit("held", cause=event.cause)
        case JobFinished():
            emit("job_done", step=event.step, nodes=list(event.nodes))
