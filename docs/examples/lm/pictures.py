"""The two pictures of a run: its loss over the steps, and one step seen unit by unit.

Promises: pure functions from records and events to a PNG, written whole or not at all; no display is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from fsdp_fn import Action, LoggedEvent, Phase
from lm.run_folder import Record, written_whole

COLOURS = {
    Action.GATHER: "#2a78b5",
    Action.COMPUTE: "#4c9f50",
    Action.REDUCE: "#d9822b",
    Action.RELEASE: "#a33b5c",
}
PHASE_HATCH = {Phase.FORWARD: "", Phase.BACKWARD: "////", Phase.RECOMPUTE: "...."}
PHASE_SHADE = {Phase.FORWARD: "#eef4fa", Phase.BACKWARD: "#fdf3e7"}
LANE_HEIGHT = 0.8
SMOOTHING = 0.8
SHORTEST_STEP = 1e-3  # milliseconds: an axis must have a length
NARROWEST = 0.0015  # of the step's length: a shorter event is drawn this wide, to be seen at all
ROOT_NAME = "(root)"


def draw_loss(records: Sequence[Record], path: Path) -> None:
    """Training loss of every step, the same smoothed, and the held-out loss where it was measured."""
    steps = [record["step"] for record in records]
    losses = [record["loss"] for record in records]
    held_out = [(record["step"], record["held_out_loss"]) for record in records if "held_out_loss" in record]
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    axes.plot(steps, losses, color="#2a78b5", alpha=0.3, linewidth=1, label="training, each step")
    axes.plot(steps, _smoothed(losses), color="#2a78b5", linewidth=2, label="training, smoothed")
    if held_out:
        label = f"held out, {held_out[-1][1]:.3f} at the end"
        axes.plot(*zip(*held_out, strict=True), "o-", color="#d9822b", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=150)
    plt.close(figure)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average, unbiased at its beginning."""
    average, weight, smoothed = 0.0, 0.0, []
    for value in values:
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(average / weight)
    return smoothed


def draw_timeline(events: Sequence[LoggedEvent], path: Path, *, title: str) -> None:
    """One step: a lane for each unit and action, in milliseconds since the step's first event.

    ``events`` holds at least one. Colour tells the action, hatching the phase; a release takes next to no
    time and is drawn as a tick.
    """
    lanes = _lanes(events)
    origin = min(event.start for event in events)
    figure, axes = plt.subplots(figsize=(13, 1.8 + 0.24 * len(lanes)), layout="constrained")
    length = max(_milliseconds(max(event.end for event in events), origin), SHORTEST_STEP)
    _shade_phases(axes, events, origin)
    for event in events:
        _draw_event(axes, event, lanes[event.unit, event.action], origin, narrowest=NARROWEST * length)
    _label_lanes(axes, lanes)
    axes.set(
        xlim=(-0.01 * length, 1.01 * length),
        ylim=(len(lanes) - 0.4, -0.6),
        xlabel="milliseconds since the step began",
    )
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    handles = _legend(events)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=150)
    plt.close(figure)


def _draw_event(axes: Axes, event: LoggedEvent, lane: int, origin: float, *, narrowest: float) -> None:
    """A bar in its lane, or a tick for a release."""
    start, end = _milliseconds(event.start, origin), _milliseconds(event.end, origin)
    top, colour = lane - LANE_HEIGHT / 2, COLOURS[event.action]
    if event.action is Action.RELEASE:
        axes.plot([start, start], [top, top + LANE_HEIGHT], color=colour, linewidth=2)
        return
    bar = Rectangle((start, top), max(end - start, narrowest), LANE_HEIGHT)
    bar.set(facecolor=colour, edgecolor="white", linewidth=0.5, hatch=PHASE_HATCH[event.phase])
    axes.add_patch(bar)


def _legend(events: Sequence[LoggedEvent]) -> list[Patch]:
    """One patch per action, and one per phase that happened."""
    used = [phase for phase in Phase if any(event.phase is phase for event in events)]
    actions = [Patch(facecolor=COLOURS[action], label=action.value) for action in Action]
    phases = [
        Patch(facecolor="#888888", edgecolor="white", hatch=PHASE_HATCH[phase], label=f"in {phase.value}")
        for phase in used
    ]
    return actions + phases


def _lanes(events: Sequence[LoggedEvent]) -> dict[tuple[str, Action], int]:
    """Row of each lane: units in the order in which they first appear, each with the actions that it had."""
    units = dict.fromkeys(event.unit for event in events)
    had = {(event.unit, event.action) for event in events}
    lanes = [(unit, action) for unit in units for action in Action if (unit, action) in had]
    return {lane: row for row, lane in enumerate(lanes)}


def _milliseconds(moment: float, origin: float) -> float:
    return (moment - origin) * 1000


def _shade_phases(axes: Axes, events: Sequence[LoggedEvent], origin: float) -> None:
    """Background from the first to the last event of forward and of backward, each with its name on top."""
    for phase, shade in PHASE_SHADE.items():
        inside = [event for event in events if event.phase is phase]
        if not inside:
            continue
        start = _milliseconds(min(event.start for event in inside), origin)
        end = _milliseconds(max(event.end for event in inside), origin)
        axes.axvspan(start, end, color=shade, zorder=0)
        axes.text((start + end) / 2, -0.7, phase.value, ha="center", va="bottom", color="#555555")


def _label_lanes(axes: Axes, lanes: dict[tuple[str, Action], int]) -> None:
    """Each lane's action at its row, each unit's name before its rows, and a line between units."""
    axes.set_yticks(list(lanes.values()), [action.value for _, action in lanes], fontsize=8)
    rows: dict[str, list[int]] = {}
    for (unit, _), row in lanes.items():
        rows.setdefault(unit, []).append(row)
    for unit, own in rows.items():
        axes.annotate(
            unit or ROOT_NAME, (0, sum(own) / len(own)), xycoords=("axes fraction", "data"), xytext=(-56, 0),
            textcoords="offset points", ha="right", va="center", fontweight="bold",
        )  # fmt: skip
        if own[0]:
            axes.axhline(own[0] - 0.5, color="#999999", linewidth=0.8)
