"""The benchmark's plots, each as the bytes of a PNG that reads on a phone."""

from itertools import cycle
from typing import Any

from matplotlib import colormaps

from adaptivespec.bench.configurations import PLAIN
from adaptivespec.bench.rows import Row
from adaptivespec.bench.store import ROWS_NAME, Store
from adaptivespec.bench.tables import Summary, pairs_of, ratios_of
from adaptivespec.plots import SET_COLOURS, add_legend, new_axes, png


def figures(store: Store, summaries: list[Summary]) -> dict[str, bytes]:
    """PNG by name, those of one batch size with its number: speed-1, accept_length-1, latency-1, shapes-1, batch_sizes,
    shapes_over_time."""
    made = {}
    sizes = list(dict.fromkeys(item.batch_size for item in summaries))
    for size in sizes:
        mine = [item for item in summaries if item.batch_size == size]
        others = [item for item in mine if item.configuration != PLAIN]
        if others:
            made[f"speed-{size}"] = speed_figure(store, others)
        if any(item.accept_length for item in others):
            made[f"accept_length-{size}"] = accept_length_figure(others)
        made[f"latency-{size}"] = latency_figure(mine)
        adaptive = [item for item in others if len(item.shape_steps) > 1]
        if adaptive:
            made[f"shapes-{size}"] = shapes_figure(adaptive)
    if len(sizes) > 1:
        made["batch_sizes"] = batch_sizes_figure(summaries)
    answer = longest_of_many_shapes(store)
    if answer:
        made["shapes_over_time"] = shapes_over_time_figure(answer)
    return made


def longest_of_many_shapes(store: Store) -> Row | None:
    """The answer of most verify steps among those that took several shapes; None where there is none."""
    answers = (row for rows in store.cells.values() for row in rows if len(set(row.shapes or ())) > 1)
    return max(answers, key=lambda row: row.verify_steps, default=None)


def speed_figure(store: Store, summaries: list[Summary]) -> bytes:
    """Decode speed over plain's: a bar to the median, a line over the quartiles, a dot for each turn; those far out as arrows
    at the edge, so that a disturbed turn does not set the scale."""
    axes, rows = _grouped_axes(summaries)
    edge = 1.5 * max((item.ratio_q3 for item in summaries if item.ratio_q3 is not None), default=1.0)
    for row, item, colour in rows:
        if item.ratio is None:
            continue
        ratios = ratios_of(pairs_of(store, item.configuration, item.task, item.batch_size))
        axes.barh(row, item.ratio, height=0.8 / _num_tasks(summaries), color=colour, alpha=0.45)
        dots = [ratio for ratio in ratios if ratio <= edge]
        axes.plot(dots, [row] * len(dots), "o", color=colour, markersize=2.5, markeredgewidth=0)
        if len(dots) < len(ratios):
            axes.plot([edge], [row], ">", color=colour, markersize=3.5)
        axes.plot([item.ratio_q1, item.ratio_q3], [row, row], color="#000000", linewidth=1)
        axes.text(1.03 * edge, row, f"{item.ratio:.2f}x", va="center", fontsize=8)
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_xlim(0, 1.2 * edge)
    axes.set_xlabel("decode speed over plain (arrow: beyond)")
    return _finish(axes, summaries, "turns a bar", [item.num_turns for item in summaries])


def accept_length_figure(summaries: list[Summary]) -> bytes:
    """Accept length of each decoder and task."""
    axes, rows = _grouped_axes(summaries)
    for row, item, colour in rows:
        if item.accept_length is not None:
            axes.barh(row, item.accept_length, height=0.8 / _num_tasks(summaries), color=colour, alpha=0.8)
            axes.text(item.accept_length + 0.03, row, f"{item.accept_length:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_xlabel("output tokens per verify step")
    return _finish(axes, summaries, "answers a bar", [item.num_answers for item in summaries])


def latency_figure(summaries: list[Summary]) -> bytes:
    """Seconds a token, from the median to the 95th percentile."""
    axes, rows = _grouped_axes(summaries)
    for row, item, colour in rows:
        if item.inter_token_p50 is not None and item.inter_token_p95 is not None:
            low, high = 1000 * item.inter_token_p50, 1000 * item.inter_token_p95
            axes.plot([low, high], [row, row], color=colour, linewidth=1.5)
            axes.plot([low], [row], "o", color=colour, markersize=5)
            axes.plot([high], [row], "|", color=colour, markersize=8)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a token: median (dot) to 95% (bar)")
    tokens = [round(item.num_answers * (item.output_tokens - 1)) for item in summaries]
    return _finish(axes, summaries, "tokens after the first a line", tokens)


def shapes_figure(summaries: list[Summary]) -> bytes:
    """Share of the verify steps by tree shape."""
    shapes = sorted({shape for item in summaries for shape in item.shape_steps})
    axes = new_axes(1.6 + 0.32 * len(summaries) + 0.3 * (len(shapes) // 4))
    labels = [f"{item.configuration}\n{item.task}" for item in summaries]
    lefts = [0.0] * len(summaries)
    for index, shape in enumerate(shapes):
        shares = [100 * item.shape_steps.get(shape, 0) / sum(item.shape_steps.values()) for item in summaries]
        colour = colormaps["viridis"](0.05 + 0.9 * index / len(shapes))
        axes.barh(range(len(labels)), shares, left=lefts, label=shape, color=colour, height=0.7)
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of verify steps, %")
    add_legend(axes, columns=4)
    return _finish(axes, summaries, "verify steps a bar", [sum(item.shape_steps.values()) for item in summaries])


def shapes_over_time_figure(answer: Row) -> bytes:
    """Tree shape of every verify step of one answer."""
    steps = answer.shapes or []
    shapes = sorted(set(steps))
    axes = new_axes(1.4 + 0.32 * len(shapes))
    rows = [shapes.index(shape) for shape in steps]
    axes.plot(range(1, len(rows) + 1), rows, "o-", color=SET_COLOURS[0], linewidth=0.6, markersize=4)
    axes.set_yticks(range(len(shapes)), shapes)
    axes.set_ylim(-0.5, len(shapes) - 0.5)
    axes.set_xlabel("verify step of the answer")
    cell = answer.cell
    where = f"{cell.configuration}, {cell.task}, prompt {answer.prompt + 1}; batch size {cell.batch_size}"
    axes.figure.supxlabel(f"{where}; source: {ROWS_NAME}", fontsize=8, color="#555555")
    return png(axes.figure)


def batch_sizes_figure(summaries: list[Summary]) -> bytes:
    """Output tokens/s of all requests together, by batch size; a line for each decoder, the mean of the tasks."""
    axes = new_axes(4.0)
    names = list(dict.fromkeys(item.configuration for item in summaries))
    sizes = sorted({item.batch_size for item in summaries})
    for name, colour in zip(names, cycle(SET_COLOURS), strict=False):
        points = []
        for size in sizes:
            speeds = [
                item.output_tokens_per_s
                for item in summaries
                if (item.configuration, item.batch_size) == (name, size) and item.output_tokens_per_s is not None
            ]
            if speeds:
                points.append((size, sum(speeds) / len(speeds)))
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name, linewidth=1.2, markersize=4)
    axes.set_xticks(sizes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at the same time")
    axes.set_ylabel("output tokens/s, prefill included")
    add_legend(axes, columns=2)
    return _finish(axes, summaries, "turns a decoder and task", [item.num_turns for item in summaries])


def _grouped_axes(summaries: list[Summary]) -> tuple[Any, list[tuple[float, Summary, str]]]:
    """Axes with a group of rows for each decoder, and (row, summary, colour of the task) for each row."""
    names = list(dict.fromkeys(item.configuration for item in summaries))
    tasks = list(dict.fromkeys(item.task for item in summaries))
    colours = dict(zip(tasks, cycle(SET_COLOURS), strict=False))
    axes = new_axes(1.6 + max(0.2 * len(tasks), 0.34) * len(names))
    rows = []
    for item in summaries:
        offset = (tasks.index(item.task) - (len(tasks) - 1) / 2) * 0.85 / len(tasks)
        rows.append((names.index(item.configuration) + offset, item, colours[item.task]))
    for task, colour in colours.items():
        axes.barh([0], [0], color=colour, label=task)  # an entry of the legend
    axes.set_yticks(range(len(names)), [name.replace("+", "\n+") for name in names], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    add_legend(axes, columns=min(len(tasks), 4))
    return axes, rows


def _num_tasks(summaries: list[Summary]) -> int:
    return len({item.task for item in summaries})


def _finish(axes: Any, summaries: list[Summary], of_what: str, numbers: list[int]) -> bytes:
    """The PNG, with n and source under the plot."""
    count = f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"
    sizes = ", ".join(map(str, dict.fromkeys(item.batch_size for item in summaries)))
    axes.figure.supxlabel(
        f"{of_what}: n = {count}; batch size {sizes}; source: {ROWS_NAME}", fontsize=8, color="#555555"
    )
    return png(axes.figure)
