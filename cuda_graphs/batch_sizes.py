"""Which batch sizes to capture for a state."""

from collections.abc import Iterable

from cuda_graphs.errors import RegistryError


def prune_batch_sizes(
    batch_sizes: Iterable[int],
    *,
    max_batch_size: int | None = None,
    max_rows: int | None = None,
    rows_per_request: int = 1,
) -> list[int]:
    """Returns the batch sizes worth capturing for a state, ascending and each once.

    A size stays if it is at most `max_batch_size` and `size * rows_per_request` is at most `max_rows`, so states with
    more rows per request are captured for fewer sizes and cost about as much as the others. The smallest size always
    stays, even beyond a limit: a state without any graph would serve no batch. Larger batches than the largest that
    stays run without a graph, or in another state: that is the caller's choice.

    Args:
        batch_sizes: requests per batch, each 1 or more, in any order; at least one.
        max_batch_size: most requests that can run together; None for no limit.
        max_rows: most token rows that one graph may process; None for no limit.
        rows_per_request: token rows of one request in this state, such as num_draft_tokens (root included) of a verify.

    Raises:
        RegistryError: no batch size, or a number below 1.
    """
    sizes = sorted(set(batch_sizes))
    limits = [limit for limit in (max_batch_size, max_rows, rows_per_request) if limit is not None]
    if not sizes or sizes[0] < 1 or min(limits) < 1:
        raise RegistryError(
            f"found batch_sizes={sizes}, max_batch_size={max_batch_size}, max_rows={max_rows},"
            f" rows_per_request={rows_per_request}; expected at least one batch size and every number 1 or more."
            " Fix: correct the number; None means no limit."
        )
    fits = [
        size
        for size in sizes
        if (max_batch_size is None or size <= max_batch_size)
        and (max_rows is None or size * rows_per_request <= max_rows)
    ]
    return fits or sizes[:1]
