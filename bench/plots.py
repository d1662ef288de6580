"""Draws what the rescaling benchmark measured: `python bench/plots.py TIMELINE.json DIRECTORY`.

Runs in an environment of its own, which has Matplotlib and nothing of ours. Gives
- `rescale-timeline.png`: latency over time, a panel for each strategy on one scale, migrations shaded;
- `rescale-ccdf.png`: which share of rows waited longer than so long;
- `rescale-silence.png`: the longest time without output, ours and others'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLORS = {
    "stop-start": "#b3423a",
    "sudden": "#d98032",
    "batched": "#b59a1f",
    "fluid": "#2a7f9e",
    "hot": "#5b4b9a",
}
"""From what everybody notices to what nobody should, and told apart without their hue by their order."""
INK, FAINT, SHADE = "#26323a", "#8b979e", "#e9e4d6"
OTHERS = "#a9b1b6"
DPI = 160

Run = dict[str, Any]


def style() -> None:
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": FAINT,
            "axes.linewidth": 0.6,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": INK,
            "ytick.color": INK,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "figure.facecolor": "white",
        }
    )


def seconds(value: float, _: object = None) -> str:
    """A time as people say it.

    >>> seconds(0.05), seconds(0.3), seconds(2.0), seconds(20.0)
    ('50 ms', '300 ms', '2 s', '20 s')
    """
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


def log_seconds(axis: Any) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: seconds(float(f"{value:.1g}"))))
    axis.set_minor_formatter(NullFormatter())


def timelines(runs: list[Run]) -> Figure:
    figure, panels = plt.subplots(
        len(runs), 1, sharex=True, sharey=True, figsize=(9, 1.0 + 1.55 * len(runs)), squeeze=False
    )
    for run, axes in zip(runs, panels[:, 0], strict=True):
        _timeline(axes, run)
    bottom = panels[-1, 0]
    bottom.set_xlabel("seconds since the load began (by when a row was due)")
    log_seconds(bottom.yaxis)
    first = runs[0]
    figure.suptitle(
        f"Latency while 2 workers become 4, then 3   ·   {first['keys']:,} keys, {first['rate']:,.0f} rows/s",
        x=0.01, ha="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    figure.text(
        0.01,
        1 - 0.46 / figure.get_figheight(),
        "line: half of the rows of each quarter of a second    ·    band: up to 99%    ·    dots: the slowest row",
        color=FAINT, fontsize=8, va="top",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / figure.get_figheight()))
    return figure


def _timeline(axes: Axes, run: Run) -> None:
    at, _, p50, _, p99, highest = zip(*run["timeline"], strict=True)
    color = COLORS.get(run["strategy"], INK)
    for migration in run["migrations"]:
        axes.axvspan(migration["began"], migration["ended"], color=SHADE, lw=0, zorder=0)
        axes.annotate(
            f"{migration['from']} → {migration['to']}",
            (migration["began"], 1), xycoords=("data", "axes fraction"), xytext=(1, 2),
            textcoords="offset points", va="bottom", fontsize=8, color=INK,
        )  # fmt: skip
    axes.fill_between(at, p50, p99, color=color, alpha=0.25, lw=0, step="post")
    axes.step(at, p50, color=color, lw=1.3, where="post")
    axes.scatter([one + 0.125 for one in at], highest, color=color, s=2.2, lw=0)
    axes.set_yscale("log")
    axes.grid(axis="y", color=FAINT, alpha=0.25, lw=0.5)
    axes.set_title(run["strategy"], loc="right", fontsize=10, fontweight="bold", color=color, pad=3)
    axes.margins(x=0.005)


def curves(runs: list[Run]) -> Figure:
    figure, axes = plt.subplots(figsize=(7.2, 4.4))
    for run in runs:
        latency, share = zip(*run["ccdf"], strict=True)
        color = COLORS.get(run["strategy"], INK)
        axes.plot(latency, share, color=color, lw=1.8, label=run["strategy"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_seconds(axes.xaxis)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:.6%}".rstrip("0%").rstrip(".") + "%")
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("rows that waited longer")
    axes.set_xlabel("latency")
    axes.grid(color=FAINT, alpha=0.25, lw=0.5)
    axes.legend(frameon=False, loc="lower left")
    axes.set_title(
        "All rows of a run with two rescalings, 2 → 4 → 3", loc="left", fontweight="bold", fontsize=11
    )
    figure.tight_layout()
    return figure


def silences(found: dict[str, float]) -> Figure:
    """Bars from zero, each with its figure."""
    names = sorted(found, key=lambda name: -found[name])
    figure, axes = plt.subplots(figsize=(7.2, 0.9 + 0.42 * len(names)))
    values = [found[name] for name in names]
    axes.barh(names, values, color=[COLORS.get(name, OTHERS) for name in names], height=0.66)
    for place, value in enumerate(values):
        axes.annotate(
            seconds(float(f"{value:.2g}")),
            (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.margins(x=0.14)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title("The longest time without output, 2 → 4", loc="left", fontweight="bold", fontsize=11)
    figure.tight_layout()
    return figure


def draw(measured: dict[str, Any], directory: Path) -> list[Path]:
    """All plots that there are figures for; the files."""
    style()
    order = list(COLORS)
    runs = sorted(measured.get("runs", []), key=lambda run: order.index(run["strategy"]))
    figures: dict[str, Figure] = {}
    if runs:
        figures["rescale-timeline"] = timelines(runs)
        figures["rescale-ccdf"] = curves(runs)
    if measured.get("silence"):
        figures["rescale-silence"] = silences(measured["silence"])
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(directory / f"{name}.png", dpi=DPI)
        plt.close(figure)
    return [directory / f"{name}.png" for name in figures]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("measured", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    files = draw(json.loads(args.measured.read_text()), args.directory)
    print(json.dumps({"files": [str(file) for file in files]}))


if __name__ == "__main__":
    main()
