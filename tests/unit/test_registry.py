"""The state registry: building under a budget, shared parts, lookup, swap, release and report."""

import json
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_graphs import (
    BudgetError,
    EagerBackend,
    RegistryError,
    StateRegistry,
    UnknownStateError,
    format_bytes,
)


class Memory:
    """A backend with a made-up device: what is built takes bytes, and gives them back once released."""

    name = "fake"

    def __init__(self, capacity: int | None = None) -> None:
        self.in_use = 1000  # something else was there before
        self.capacity = capacity
        self.num_releases = 0

    def take(self, num_bytes: int) -> None:
        if self.capacity is not None and self.in_use + num_bytes > self.capacity:
            raise MemoryError("device full")
        self.in_use += num_bytes

    def bytes_in_use(self) -> int:
        return self.in_use

    def reported_bytes(self, made: object) -> int:
        return 0

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def release(self) -> None:
        self.in_use = 1000
        self.num_releases += 1


@dataclass
class Log:
    built: list = field(default_factory=list)
    activated: list = field(default_factory=list)
    released: list = field(default_factory=list)


def sized_registry(memory: Memory, log: Log, **options) -> StateRegistry[int, list[int]]:
    """A registry whose state of key n takes n bytes."""

    def build(key: int) -> list[int]:
        log.built.append(key)
        memory.take(key)
        return [key]

    return StateRegistry(build, backend=memory, activate=log.activated.append, release=log.released.append, **options)


def test_builds_in_the_given_order_and_measures_each_state():
    log, seen = Log(), []
    registry = sized_registry(Memory(), log)
    report = registry.build_all([30, 10, 20], progress=lambda *args: seen.append(args))
    assert log.built == [30, 10, 20]
    assert registry.keys == (30, 10, 20)
    assert [(s.key, s.num_bytes, s.parts) for s in report.states] == [(30, 30, ()), (10, 10, ()), (20, 20, ())]
    assert all(s.seconds >= 0 for s in report.states)
    assert report.total_bytes == 60
    assert [(s.key, at, total) for s, at, total in seen] == [(30, 1, 3), (10, 2, 3), (20, 3, 3)]
    assert registry.build_all([40]).total_bytes == 100
    assert log.activated == []


def test_a_shared_part_is_built_and_charged_once():
    memory, made = Memory(), []

    def make(name: str, num_bytes: int) -> object:
        made.append(name)
        memory.take(num_bytes)
        return object()

    def build(key: tuple[int, int, int]) -> tuple[object, object]:
        memory.take(1)
        verify = registry.parts.get("verify", key[2], lambda: make("verify", 100))
        extend = registry.parts.get("extend", key[2], lambda: make("extend", 10))
        return verify, extend

    registry = StateRegistry(build, backend=memory)
    report = registry.build_all([(5, 3, 6), (5, 2, 6), (3, 4, 4)])
    assert made == ["verify", "extend"] * 2
    assert registry.lookup((5, 3, 6))[0] is registry.lookup((5, 2, 6))[0]
    assert registry.lookup((5, 3, 6))[0] is not registry.lookup((3, 4, 4))[0]
    assert [s.num_bytes for s in report.states] == [1, 1, 1]
    assert [(p.kind, p.key, p.num_bytes, p.num_users) for p in report.parts] == [
        ("verify", 6, 100, 2),
        ("extend", 6, 10, 2),
        ("verify", 4, 100, 1),
        ("extend", 4, 10, 1),
    ]
    assert report.states[1].parts == (("verify", 6), ("extend", 6))
    assert report.total_bytes == memory.in_use - 1000 == 223
    assert report.bytes_with_parts((5, 2, 6)) == 111
    assert registry.parts.has("verify", 4)
    assert not registry.parts.has("verify", 5)


def test_a_part_made_inside_a_part_is_charged_to_itself_only():
    memory = Memory()

    def outer() -> str:
        memory.take(5)
        return registry.parts.get("inner", 0, lambda: memory.take(7) or "inner")

    registry = StateRegistry(lambda key: registry.parts.get("outer", 0, outer), backend=memory)
    report = registry.build_all([1])
    assert {p.kind: p.num_bytes for p in report.parts} == {"outer": 5, "inner": 7}
    assert report.states[0].num_bytes == 0


def test_a_part_that_fails_to_build_leaves_nothing_behind():
    registry = StateRegistry(lambda key: key, backend=EagerBackend())
    with pytest.raises(ZeroDivisionError):
        registry.parts.get("verify", 1, lambda: 1 / 0)
    assert registry.parts.get("verify", 1, lambda: "second try") == "second try"


def test_the_same_key_of_another_kind_is_another_part():
    registry = StateRegistry(lambda key: key, backend=EagerBackend())
    assert registry.parts.get("verify", 1, lambda: "a") == "a"
    assert registry.parts.get("extend", 1, lambda: "b") == "b"


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    part_of=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    budget=st.integers(0, 300),
)
def test_over_budget_refuses_says_what_was_needed_and_releases_everything(sizes, part_of, budget):
    memory, released = Memory(), []

    def build(key: int) -> str:
        memory.take(sizes[key])
        registry.parts.get("part", part_of[key], lambda: memory.take(20))
        return f"state {key}"

    registry = StateRegistry(build, backend=memory, budget_bytes=budget, release=released.append)
    keys = list(range(len(sizes)))
    fresh = [part_of[key] not in part_of[:key] for key in keys]
    charged = [sizes[key] + 20 * fresh[key] for key in keys]
    if sum(charged) <= budget:
        assert registry.build_all(keys).total_bytes == sum(charged) == memory.in_use - 1000
        return
    with pytest.raises(BudgetError) as caught:
        registry.build_all(keys)
    error = caught.value
    num_built = sum(need.is_measured for need in error.needs)
    assert sum(charged[: num_built - 1]) <= budget < error.needed_bytes == sum(charged[:num_built])
    assert [need.num_bytes for need in error.needs] == charged[:num_built] + [None] * (len(keys) - num_built)
    assert error.is_lower_bound == (num_built < len(keys))
    assert released == [f"state {key}" for key in reversed(range(num_built))]
    assert registry.keys == ()
    assert memory.in_use == 1000


def test_an_estimate_over_budget_refuses_before_building_the_key():
    memory, log = Memory(), Log()
    registry = sized_registry(memory, log, budget_bytes=100, estimate=lambda key: key * 2)
    with pytest.raises(BudgetError) as caught:
        registry.build_all([40, 31, 5])
    error = caught.value
    assert log.built == [40]
    assert log.released == [[40]]
    assert (error.needed_bytes, error.budget_bytes, error.is_lower_bound) == (40 + 62 + 10, 100, False)
    assert str(error) == (
        "found that the runtime states need 112 bytes; expected: at most 100 bytes. Per key: 40 40 bytes measured; 31 62"
        " bytes estimated; 5 10 bytes estimated. Fix: raise the budget or leave more memory free for it, capture fewer or"
        " smaller batch sizes, or build fewer keys."
    )


def test_exactly_the_budget_is_enough():
    report = sized_registry(Memory(), Log(), budget_bytes=60, estimate=lambda key: key).build_all([30, 20, 10])
    assert report.total_bytes == report.budget_bytes == 60


def test_a_device_without_memory_is_a_budget_error_that_names_the_key():
    memory, log = Memory(capacity=1050), Log()
    registry = sized_registry(memory, log)
    with pytest.raises(
        BudgetError, match=r"ran out of memory while building 20; expected: no budget was set"
    ) as caught:
        registry.build_all([40, 20, 10])
    assert isinstance(caught.value.__cause__, MemoryError)
    assert "need at least 40 bytes" in str(caught.value)
    assert caught.value.out_of_memory_key == 20
    assert memory.in_use == 1000


def test_any_other_error_of_a_build_passes_through_after_the_release():
    memory, released = Memory(), []

    def build(key: int) -> int:
        memory.take(5)
        return 10 // key

    registry = StateRegistry(build, backend=memory, release=released.append)
    with pytest.raises(ZeroDivisionError):
        registry.build_all([5, 2, 0, 1])
    assert released == [5, 2]
    assert registry.keys == ()
    assert memory.in_use == 1000


@pytest.mark.parametrize("keys", [[], [1, 2, 1]])
def test_bad_key_lists_are_refused_and_leave_the_built_states_alone(keys):
    registry = sized_registry(Memory(), Log())
    registry.build_all([7])
    with pytest.raises(RegistryError, match=r"Fix: "):
        registry.build_all(keys)
    with pytest.raises(RegistryError, match=r"the key 7 twice"):
        registry.build_all([7])
    assert registry.keys == (7,)


def test_a_negative_budget_is_refused():
    with pytest.raises(RegistryError, match=r"found budget_bytes=-1"):
        StateRegistry(lambda key: key, backend=EagerBackend(), budget_bytes=-1)


def test_an_unknown_key_lists_the_known_ones():
    registry = sized_registry(Memory(), Log())
    with pytest.raises(UnknownStateError, match=r"no runtime state for 3; expected one of: none"):
        registry.lookup(3)
    registry.build_all([1, 2])
    with pytest.raises(UnknownStateError, match=r"no runtime state for 3; expected one of: 1, 2\. Fix:") as caught:
        registry.swap(3)
    assert isinstance(caught.value, LookupError)
    assert (caught.value.key, caught.value.known) == (3, (1, 2))
    assert registry.active_key is None


def test_swap_activates_only_another_state_and_counts_switches():
    log = Log()
    registry = StateRegistry(lambda key: [key], backend=EagerBackend(), activate=log.activated.append)
    registry.build_all([(4, 4, 5), (4, 3, 5)])  # equal in num_steps and in num_draft_tokens
    first = registry.swap((4, 4, 5))
    assert (registry.active_key, registry.num_switches) == ((4, 4, 5), 0)
    assert registry.swap((4, 4, 5)) is first
    second = registry.swap((4, 3, 5))
    assert second is registry.lookup((4, 3, 5))
    assert second is not first
    assert (registry.active_key, registry.num_switches) == ((4, 3, 5), 1)
    registry.swap((4, 4, 5))
    assert log.activated == [first, second, first]
    assert registry.report().num_switches == 2


def test_keys_that_share_one_state_object_swap_without_activation():
    log, shared = Log(), ["the state"]
    registry = StateRegistry(lambda key: shared, backend=EagerBackend(), activate=log.activated.append)
    registry.build_all(["a", "b"])
    registry.swap("a")
    registry.swap("b")
    assert (log.activated, registry.active_key, registry.num_switches) == ([shared], "b", 0)


def test_states_that_compare_equal_are_still_different():
    log = Log()
    registry = StateRegistry(lambda key: [], backend=EagerBackend(), activate=log.activated.append)
    registry.build_all([1, 2])
    registry.swap(1)
    registry.swap(2)
    assert (len(log.activated), registry.num_switches) == (2, 1)


def test_after_a_failed_activation_the_next_swap_activates_again():
    activated = []

    def activate(state: str) -> None:
        activated.append(state)
        if activated == ["state 1", "state 2"]:
            raise RuntimeError("half swapped")

    registry = StateRegistry(lambda key: f"state {key}", backend=EagerBackend(), activate=activate)
    registry.build_all([1, 2])
    registry.swap(1)
    with pytest.raises(RuntimeError, match=r"half swapped"):
        registry.swap(2)
    assert registry.active_key is None
    registry.swap(1)
    assert activated == ["state 1", "state 2", "state 1"]
    assert registry.active_key == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_num_switches_is_the_number_of_changes(walk):
    log = Log()
    registry = StateRegistry(lambda key: [key], backend=EagerBackend(), activate=log.activated.append)
    registry.build_all(range(4))
    for key in walk:
        assert registry.swap(key) == [key]
        assert log.activated[-1] == [key]
    changes = sum(a != b for a, b in pairwise(walk))
    assert registry.num_switches == changes == len(log.activated) - 1


def test_release_all_drops_states_parts_and_the_active_one():
    memory, log = Memory(), Log()
    registry = sized_registry(memory, log)
    registry.build_all([3, 2, 1])
    registry.parts.get("verify", 1, list)
    registry.swap(2)
    registry.release_all()
    assert log.released == [[1], [2], [3]]
    assert (registry.keys, registry.active_key, memory.in_use) == ((), None, 1000)
    assert not registry.parts.has("verify", 1)
    assert registry.report().states == ()
    registry.build_all([3])  # usable again
    assert registry.swap(3) == [3]


def test_eager_states_cost_what_they_report_and_the_budget_holds_against_it():
    def make(budget: int | None) -> StateRegistry[int, list[int]]:
        def build(key: int) -> list[int]:
            registry.parts.get("part", 0, lambda: [0] * 4)
            return [0] * key

        registry = StateRegistry(build, backend=EagerBackend(size_of=len), budget_bytes=budget)
        return registry

    assert make(None).build_all([3, 2]).total_bytes == 9
    with pytest.raises(BudgetError, match=r"need 9 bytes; expected: at most 8 bytes"):
        make(8).build_all([3, 2])
    assert StateRegistry(lambda key: [0], backend=EagerBackend(), budget_bytes=0).build_all([1]).total_bytes == 0


def test_the_report_is_json_with_readable_keys():
    @dataclass(frozen=True)
    class Shape:
        steps: int

        def __str__(self) -> str:
            return f"<{self.steps}>"

    registry = StateRegistry(
        lambda key: registry.parts.get("verify", (8, True), list), backend=EagerBackend(), budget_bytes=5
    )
    registry.build_all([Shape(3), (3, 4, 4)])
    registry.swap(Shape(3))
    got = json.loads(json.dumps(registry.report().to_dict()))
    assert [state["key"] for state in got["states"]] == ["<3>", [3, 4, 4]]
    assert got["states"][1]["parts"] == [["verify", [8, True]]]
    assert got["parts"][0]["num_users"] == 2
    assert (got["active_key"], got["budget_bytes"], got["backend"], got["total_bytes"]) == ("<3>", 5, "eager", 0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.50 KiB (1536 bytes)"),
        (3 << 40, "3072.00 GiB (3298534883328 bytes)"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text
