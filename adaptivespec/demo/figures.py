"""The demo's plots, each as the bytes of a PNG that reads on a phone."""

from typing import Any

from matplotlib import colormaps

from adaptivespec.demo.configurations import ADAPTIVE_NAME
from adaptivespec.demo.measure import ALL_SETS, Measurements
from adaptivespec.plots import SET_COLOURS, add_legend, new_axes, png


def figures(found: Measurements) -> dict[str, bytes]:
    """PNG by name ("speed", "accept_length", "shapes_by_set", "shapes_over_time"); those without data are left out."""
    made = {}
    if found.pairs:
        made["speed"] = speed_figure(found)
        made["accept_length"] = accept_length_figure(found)
    if any(pair.other.shape_steps for pair in found.of(ADAPTIVE_NAME)):
        made["shapes_by_set"] = shapes_by_set_figure(found)
    if found.shape_trace:
        made["shapes_over_time"] = shapes_over_time_figure(found)
    return made


def speed_figure(found: Measurements) -> bytes:
    """Speed ratio to plain: a bar to the median of each prompt set, and a dot for each pair."""
    axes, rows = _grouped_axes(found)
    for row, name, prompt_set, colour in rows:
        pairs = found.of(name, prompt_set)
        ratios = [pair.ratio for pair in pairs if pair.ratio is not None]
        median = found.summaries()[name][prompt_set].ratio
        if median is None:
            continue
        axes.barh(row, median, height=0.22, color=colour, alpha=0.45)
        axes.plot(ratios, [row] * len(ratios), "o", color=colour, markersize=4, markeredgewidth=0)
        axes.text(max(ratios) + 0.03, row, f"{median:.2f}x", va="center", fontsize=9)
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_xlabel("decode tokens/s, ratio to plain decoding (1 = plain)")
    return png(axes.figure)


def accept_length_figure(found: Measurements) -> bytes:
    """Accept length of each decoder and prompt set, bonus token included."""
    axes, rows = _grouped_axes(found)
    for row, name, prompt_set, colour in rows:
        length = found.summaries()[name][prompt_set].accept_length
        if length is not None:
            axes.barh(row, length, height=0.22, color=colour, alpha=0.8)
            axes.text(length + 0.03, row, f"{length:.2f}", va="center", fontsize=9)
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_xlabel("tokens per verify step, bonus token included")
    return png(axes.figure)


def shapes_by_set_figure(found: Measurements) -> bytes:
    """Share of ADAPTIVE's verify steps by tree shape, for each prompt set."""
    by_set = {name: summary.shape_steps for name, summary in found.summaries()[ADAPTIVE_NAME].items()}
    by_set = {name: steps for name, steps in by_set.items() if steps and name != ALL_SETS}
    colours = _shape_colours(found)
    axes = new_axes(1.4 + 0.5 * len(by_set) + 0.3 * (len(colours) // 4))
    lefts = [0.0] * len(by_set)
    for shape, colour in colours.items():
        shares = [100 * steps.get(shape, 0) / sum(steps.values()) for steps in by_set.values()]
        axes.barh(list(by_set), shares, left=lefts, label=shape, color=colour, height=0.6)
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of verify steps, %")
    add_legend(axes, columns=4)
    return png(axes.figure)


def shapes_over_time_figure(found: Measurements) -> bytes:
    """Tree shape of every verify step of one generation."""
    trace, colours = found.shape_trace, _shape_colours(found)
    shapes = sorted(set(trace))
    axes = new_axes(1.2 + 0.32 * len(shapes))
    rows = [shapes.index(shape) for shape in trace]
    steps = range(1, len(trace) + 1)
    axes.plot(steps, rows, color="#BBBBBB", linewidth=0.8, zorder=1)
    axes.scatter(steps, rows, s=22, c=[colours[shape] for shape in trace], zorder=2)
    axes.set_yticks(range(len(shapes)), shapes)
    axes.set_ylim(-0.5, len(shapes) - 0.5)
    axes.set_xlabel("verify step of the generation")
    return png(axes.figure)


def _grouped_axes(found: Measurements) -> tuple[Any, list[tuple[float, str, str, str]]]:
    """Axes with a group of rows for each decoder, and (row, decoder, prompt set, colour) for each row."""
    names = list(found.summaries())
    axes = new_axes(1.3 + 0.32 * len(names) * len(found.prompt_sets))
    offsets = [0.26 * (index - (len(found.prompt_sets) - 1) / 2) for index in range(len(found.prompt_sets))]
    rows = [
        (group + offset, name, prompt_set, colour)
        for group, name in enumerate(names)
        for offset, prompt_set, colour in zip(offsets, found.prompt_sets, SET_COLOURS, strict=False)
    ]
    for prompt_set, colour in zip(found.prompt_sets, SET_COLOURS, strict=False):
        axes.barh([0], [0], color=colour, label=prompt_set)  # an entry of the legend
    axes.set_yticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    add_legend(axes, columns=len(found.prompt_sets))
    return axes, rows


def _shape_colours(found: Measurements) -> dict[str, Any]:
    """One colour for each shape that ADAPTIVE used, the same in every figure."""
    used = {shape for pair in found.of(ADAPTIVE_NAME) for shape in pair.other.shape_steps}
    shapes = sorted(used.union(found.shape_trace))
    return {shape: colormaps["viridis"](0.05 + 0.9 * index / len(shapes)) for index, shape in enumerate(shapes)}
