"""The picture of a plan: everything is inside it, nothing lies on anything else, and it has what the plans have."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quicoll.cli.app import app
from quicoll.cli.explain import ExplainedCall
from quicoll.plan import Plan, SendStep
from quicoll.plan.forecast import Flight, Forecast, predict
from quicoll.plan.network import NetworkModel
from quicoll.plan.picture import CLEAR_ARROWS, MAX_ARROWS, SUMMARY_ARROWS, draw

SPACE = "{http://www.w3.org/2000/svg}"
# A wide face (DejaVu Sans Bold) takes 0.62 of its size for a character on the mean of what is written here.
EM = 0.62


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - of our own making


def drawn(question: ExplainedCall, network: NetworkModel) -> tuple[str, list[Plan], Forecast]:
    schedule = question.schedule()
    taken = schedule.cheapest(network) if question.algorithm == "auto" else question.algorithm
    plans = schedule.plans(taken)
    forecast = predict(plans, network)
    title = f"{question.collective} of {question.world} ranks"
    notes = ["predicted 1 ms", plans[0].signature]
    return draw(forecast, network, title=title, notes=notes, full=True), plans, forecast


def network_of(sites: tuple[int, ...]) -> NetworkModel:
    return NetworkModel.between(sites, latency=1e-4, rate=1.25e8, far_latency=25e-3, far_rate=2.5e7)


def arrows(root: ET.Element) -> list[ET.Element]:
    return [line for group in root.findall(f"{SPACE}g") for line in group.findall(f"{SPACE}line")]


def boxes(root: ET.Element) -> list[tuple[float, float, float, float, str]]:
    """(left, top, right, bottom, text) of each text, as a wide face would take it."""
    found = []
    for text in root.iter(f"{SPACE}text"):
        size = float(text.get("font-size", "12"))
        words = text.text or ""
        x, y, width = float(text.get("x", "nan")), float(text.get("y", "nan")), EM * size * len(words)
        left = x - {"end": width, "middle": width / 2}.get(text.get("text-anchor", "start"), 0.0)
        found.append((left, y - 0.8 * size, left + width, y + 0.1 * size, words))
    return found


def layouts(world: int) -> list[tuple[int, ...]]:
    return [
        (0,) * world,
        tuple(int(rank >= world // 2) for rank in range(world)),
        tuple(rank % 3 for rank in range(world)),
        tuple(range(world)),
    ]


OPERATIONS = [
    ("all_reduce", "direct"), ("all_reduce", "tree"), ("all_reduce", "hierarchical"), ("all_reduce", "exchange"),
    ("all_reduce", "ring"), ("reduce", "auto"), ("reduce_scatter", "auto"), ("all_gather", "direct"),
    ("all_gather", "hierarchical"), ("gather", "hierarchical"), ("scatter", "hierarchical"), ("broadcast", "tree"),
    ("broadcast", "hierarchical"), ("all_to_all", "auto"), ("barrier", "auto"), ("send", "auto"),
]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 6, 8, 33])
@pytest.mark.parametrize(("collective", "algorithm"), OPERATIONS)
def test_words_stay_inside_and_apart_and_every_message_has_one_arrow(
    collective: str, algorithm: str, world: int
) -> None:
    if collective == "send" and world == 1:
        return
    for number, sites in enumerate(layouts(world) if world < 33 else layouts(world)[1:2]):
        normal = network_of(sites)
        question = ExplainedCall(
            collective, world=world, nbytes=(64, 100_000)[number % 2], algorithm=algorithm, sites=sites,
            chunk_bytes=1 << 16,
        )  # fmt: skip
        text, plans, forecast = drawn(question, normal)
        root = parsed(text)
        sends = Counter(
            (each.rank, step.peer)
            for each in plans
            for lane in each.lanes
            for step in lane.steps
            if isinstance(step, SendStep)
        )
        shown = Counter(tuple(map(int, re.findall(r"\d+", _title(line))[:2])) for line in arrows(root))
        if len(forecast.flights) <= MAX_ARROWS:
            assert shown == sends
        inside_and_apart(root)


def _title(line: ET.Element) -> str:
    return line.findtext(f"{SPACE}title") or ""


def inside_and_apart(root: ET.Element) -> None:
    _, _, width, height = map(float, root.get("viewBox", "").split())
    texts = boxes(root)
    for left, top, right, bottom, words in texts:
        assert left >= 0 <= top, words
        assert right <= width and bottom <= height, words  # noqa: PT018 - one place
    for i, one in enumerate(texts):
        for other in texts[i + 1 :]:
            clear = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert clear, (one[4], other[4])
    for line in root.iter(f"{SPACE}line"):
        for name, most in (("x1", width), ("x2", width), ("y1", height), ("y2", height)):
            assert 0 <= float(line.get(name, "nan")) <= most
    for rect in root.iter(f"{SPACE}rect"):
        assert float(rect.get("x", "0")) + float(rect.get("width", "nan")) <= width
        assert float(rect.get("y", "0")) + float(rect.get("height", "nan")) <= height


def test_the_picture_in_the_documentation_is_what_the_command_draws(tmp_path: Path) -> None:
    kept = Path(__file__).parents[3] / "docs" / "plan.svg"
    text = (kept.parent / "collectives.md").read_text()
    arguments = re.search(r"^    quicoll (explain all_reduce .*) --plot plan\.svg$", text, re.MULTILINE)
    assert arguments is not None
    result = CliRunner().invoke(app, [*arguments[1].split(), "--plot", str(tmp_path / "plan.svg")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plan.svg").read_text() == kept.read_text()
    assert len(kept.read_bytes()) < 60_000


def test_the_same_forecast_gives_the_same_text_and_words_are_escaped() -> None:
    network = network_of((0, 0, 1, 1))
    forecast = predict(ExplainedCall("barrier", world=4, nbytes=0).schedule().plans(""), network)
    text = draw(forecast, network, title="a < b & c", notes=["one", "two > one"])
    assert text == draw(forecast, network, title="a < b & c", notes=["one", "two > one"])
    root = parsed(text)
    assert root.findtext(f"{SPACE}title") == "a < b & c"
    assert {"a < b & c", "one", "two > one"} <= {each.text for each in root.iter(f"{SPACE}text")}


def test_an_arrow_goes_from_the_senders_line_to_the_receivers_at_the_times_of_the_forecast() -> None:
    network = network_of((0, 0, 1))
    flights = (Flight(0, 1, 0, 1000, 0.0, 0.5), Flight(1, 2, 0, 10, 0.25, 1.0))
    root = parsed(draw(Forecast(1.0, (0.5, 1.0, 1.0), flights, 10, 1000), network, title="two"))
    rank_at = {
        each.text: float(each.get("x", "nan"))
        for each in root.iter(f"{SPACE}text")
        if each.get("font-weight") == "bold"
    }
    groups = {group.get("class"): group.findall(f"{SPACE}line") for group in root.findall(f"{SPACE}g")}
    (near,), (far,) = groups["near"], groups["far"]

    def ends(line: ET.Element) -> list[float]:
        return [float(line.get(name, "nan")) for name in ("x1", "y1", "x2", "y2")]

    assert [ends(near)[0], ends(near)[2]] == [rank_at["0"], rank_at["1"]]
    assert [ends(far)[0], ends(far)[2]] == [rank_at["1"], rank_at["2"]]
    start, half, quarter, end = ends(near)[1], ends(near)[3], ends(far)[1], ends(far)[3]
    assert half - start == pytest.approx(2 * (quarter - start), abs=0.2)
    assert end - start == pytest.approx(2 * (half - start), abs=0.2)
    assert float(near.get("stroke-width", "0")) > float(far.get("stroke-width", "9"))


def test_sites_and_what_is_between_them_are_named_only_where_there_are_several() -> None:
    def words(sites: tuple[int, ...]) -> set[Any]:
        root = parsed(drawn(ExplainedCall("broadcast", world=4, nbytes=64, sites=sites), network_of(sites))[0])
        return {each.text for each in root.iter(f"{SPACE}text")}

    assert {"site", "message between sites"} <= words((0, 0, 1, 1))
    assert not {"site", "message between sites"} & words((0, 0, 0, 0))
    assert "message" in words((0, 0, 0, 0))


def test_times_on_the_axis_are_round_and_not_too_many() -> None:
    network = network_of((0, 0))
    for seconds in (3.3e-6, 9.99e-4, 1e-3, 0.0421, 1.0, 7.7, 59.0):
        flights = (Flight(0, 1, 0, 1, 0.0, seconds),)
        root = parsed(draw(Forecast(seconds, (seconds, seconds), flights, 0, 1), network, title="t"))
        times = [
            each.text or "" for each in root.iter(f"{SPACE}text") if re.fullmatch(r"[0-9.]+ (us|ms|s)", each.text or "")
        ]
        assert 4 <= len(times) <= 10
        assert all(re.fullmatch(r"[0-9.]{1,4} (us|ms|s)", time) for time in times), times


def test_of_very_many_messages_the_rest_is_counted() -> None:
    flights = tuple(Flight(0, 1, k, 1, k * 1.0, k + 1.0) for k in range(MAX_ARROWS + 5))
    text = draw(Forecast(MAX_ARROWS + 6.0, (1.0, 1.0), flights, 0, 1), network_of((0, 0)), title="many", full=True)
    assert "5 later messages are not drawn" in text
    assert len(arrows(parsed(text))) == MAX_ARROWS


@pytest.mark.parametrize(("world", "algorithm"), [(2, "direct"), (4, "direct"), (8, "hierarchical"), (16, "ring")])
def test_of_64_mib_a_few_chunks_are_drawn_whole_and_the_picture_is_small(world: int, algorithm: str) -> None:
    network = network_of(tuple(2 * rank // world for rank in range(world)))
    question = ExplainedCall(
        "all_reduce", world=world, nbytes=64 << 20, algorithm=algorithm, sites=tuple(network.sites)
    )
    forecast = predict(question.schedule().plans(algorithm), network)
    text = draw(forecast, network, title="summary")
    root = parsed(text)
    inside_and_apart(root)
    shown = Counter(int(re.findall(r"\d+", _title(line))[2]) for line in arrows(root))
    lanes = Counter(flight.lane for flight in forecast.flights)
    assert shown == {lane: lanes[lane] for lane in shown}, "each chunk that is drawn has all of its messages"
    assert {min(lanes)} <= set(shown)
    if len(forecast.flights) <= CLEAR_ARROWS:
        assert set(shown) == set(lanes)
        return
    assert len(shown) == 1 or (sum(shown.values()) <= SUMMARY_ARROWS and max(lanes) in shown)
    assert f"{sum(shown.values())} of {len(forecast.flights)} messages" in "".join(root.itertext())
    assert len(text) < 40_000


def test_long_words_are_broken_and_at_last_left_out() -> None:
    network = network_of((0, 0))
    forecast = predict(ExplainedCall("barrier", world=2, nbytes=0).schedule().plans(""), network)
    counts = ",".join(["79438"] * 200)
    root = parsed(draw(forecast, network, title="a title " * 30, notes=[f"counts={counts}", "x" * 500]))
    inside_and_apart(root)
    words = [each.text or "" for each in root.iter(f"{SPACE}text")]
    assert sum(line.endswith(" ...") for line in words) == 3
