"""Which batch sizes a state is captured for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_graphs import RegistryError, prune_batch_sizes

sizes = st.lists(st.integers(1, 200), min_size=1, max_size=20)
limit = st.none() | st.integers(1, 400)


@given(sizes, limit, limit, st.integers(1, 40))
def test_every_size_within_the_limits_stays_and_no_other_but_the_smallest(batch_sizes, max_batch, max_rows, rows):
    got = prune_batch_sizes(batch_sizes, max_batch_size=max_batch, max_rows=max_rows, rows_per_request=rows)

    def fits(size: int) -> bool:
        return (max_batch is None or size <= max_batch) and (max_rows is None or size * rows <= max_rows)

    assert got == (sorted({size for size in batch_sizes if fits(size)}) or [min(batch_sizes)])


def test_states_with_more_rows_per_request_keep_fewer_sizes():
    batch_sizes = [1, 2, 4, 8, 16, 32]
    assert prune_batch_sizes(batch_sizes, max_rows=64, rows_per_request=4) == [1, 2, 4, 8, 16]
    assert prune_batch_sizes(batch_sizes, max_rows=64, rows_per_request=8) == [1, 2, 4, 8]
    assert prune_batch_sizes(batch_sizes, max_rows=3, rows_per_request=8) == [1]
    assert prune_batch_sizes(iter(batch_sizes)) == batch_sizes


@pytest.mark.parametrize(
    ("batch_sizes", "options"),
    [([], {}), ([0, 1], {}), ([1], {"max_rows": 0}), ([1], {"max_batch_size": -1}), ([1], {"rows_per_request": 0})],
)
def test_numbers_below_one_and_empty_lists_are_refused(batch_sizes, options):
    with pytest.raises(RegistryError, match=r"found batch_sizes=.* Fix: "):
        prune_batch_sizes(batch_sizes, **options)
