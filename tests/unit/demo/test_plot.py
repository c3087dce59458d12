"""The picture of a demo: every number in it is an event of the run."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from quicoll.demo.plot import draw_run
from quicoll.demo.timeline import FaultMark, Moment

NODES = ["worker-0", "worker-1", "worker-2"]
BEGAN = 100.0


def event(t: float, node: str, kind: str, **fields: object) -> Moment:
    return Moment(BEGAN + t, node, kind, dict(fields))


def history() -> list[Moment]:
    """worker-2 is killed at 5 s; the others notice at 6 s, go on as two, and it is back at 8 s; the end is at 10 s."""
    found = [event(1.0, node, "view_installed", view=1, nodes=NODES) for node in NODES]
    found += [event(6.0, node, "view_ended", view=1, cause="worker-2 is lost") for node in NODES[:2]]
    found += [event(6.5, node, "view_installed", view=2, nodes=NODES[:2]) for node in NODES[:2]]
    found += [event(8.0, node, "view_ended", view=2, cause="worker-2 joins") for node in NODES[:2]]
    found += [event(8.5, node, "view_installed", view=3, nodes=NODES) for node in NODES]
    for step, t in enumerate((2.0, 3.0, 4.0, 7.0, 9.0, 10.0), start=1):
        found += [event(t, node, "step_committed", step=step, view=1) for node in NODES[:2]]
        found += [event(t, node, "progress", step=step, loss=2.0 / step + rank) for rank, node in enumerate(NODES[:2])]
    return found


FAULTS = [FaultMark(t=BEGAN + 5.0, node="worker-2", cause="killed")]


def drawn(history: list[Moment] | None = None, faults: list[FaultMark] | None = None) -> ElementTree.Element:
    text = draw_run(
        globals()["history"]() if history is None else history,
        FAULTS if faults is None else faults,
        nodes=NODES,
        began=BEGAN,
    )
    return ElementTree.fromstring(text)  # noqa: S314 - it is ours


def all_of(picture: ElementTree.Element, tag: str) -> list[ElementTree.Element]:
    return picture.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def bars(picture: ElementTree.Element) -> dict[str, list[tuple[str, float, float]]]:
    """Of each node: members of the view, from and to which pixel."""
    found: dict[str, list[tuple[str, float, float]]] = {node: [] for node in NODES}
    for rectangle in all_of(picture, "rect"):
        for title in rectangle:
            node, _, rest = (title.text or "").partition(": in a view of ")
            x = float(rectangle.attrib["x"])
            found[node].append((rest, x, x + float(rectangle.attrib["width"])))
    return found


def test_a_worker_has_a_bar_for_each_view_that_ends_where_it_was_killed() -> None:
    found = bars(drawn())
    assert [members for members, _, _ in found["worker-0"]] == ["3", "2", "3"]
    assert [members for members, _, _ in found["worker-2"]] == ["3", "3"]
    (_, since, until), (_, again, _) = found["worker-2"]
    second = (until - since) / 4
    assert abs((again - until) / second - 3.5) < 0.1
    assert abs((found["worker-0"][0][2] - since) / second - 5.0) < 0.1, "the others were in the view until they noticed"


def test_the_loss_of_a_step_is_the_mean_of_those_that_told_theirs_at_its_commit() -> None:
    (line,) = all_of(drawn(), "polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 6
    losses = [2.0 / step + 0.5 for step in range(1, 7)]
    a_unit = (points[-1][1] - points[0][1]) / (losses[0] - losses[-1])
    for (_, y), loss in zip(points, losses, strict=True):
        assert abs(y - points[0][1] - (losses[0] - loss) * a_unit) < 0.2


def test_a_fault_is_a_line_with_its_name_at_its_time() -> None:
    picture = drawn()
    texts = [text.text for text in all_of(picture, "text")]
    assert "worker-2: killed" in texts
    (line,) = (path for path in all_of(picture, "path") if path.attrib.get("stroke-dasharray"))
    found = re.match(r"M([0-9.]+) ", line.attrib["d"])
    assert found is not None
    assert abs(float(found[1]) - bars(picture)["worker-2"][0][2]) < 0.2


def test_a_run_that_came_to_nothing_is_drawn_all_the_same() -> None:
    assert bars(drawn([], [])) == {node: [] for node in NODES}


def test_the_picture_is_small_and_does_not_depend_on_the_order_of_the_events() -> None:
    text = draw_run(history(), FAULTS, nodes=NODES, began=BEGAN)
    assert text == draw_run(reversed(history()), FAULTS, nodes=NODES, began=BEGAN)
    assert len(text) < 20_000
