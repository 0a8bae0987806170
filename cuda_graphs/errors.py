"""Errors of the registry: each says what was found, what was expected and how to fix it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


class RegistryError(Exception):
    """Base of every error that this package raises on its own account."""


class UnknownStateError(RegistryError, LookupError):
    """A key was asked for that has no built state; the message lists the keys that have one."""

    def __init__(self, key: Hashable, known: Sequence[Hashable]) -> None:
        self.key = key
        self.known = tuple(known)
        names = ", ".join(str(k) for k in self.known) or "none (build_all has not run)"
        super().__init__(
            f"found no runtime state for {key}; expected one of: {names}. Fix: add the key to the list given to build_all."
        )


@dataclass(frozen=True)
class Need:
    """Memory of one key in a budget refusal.

    `num_bytes` is None where nothing is known: not built yet, and the caller gave no estimate. A part shared by several
    keys is charged to the first of them that was built.
    """

    key: Hashable
    num_bytes: int | None
    is_measured: bool

    def __str__(self) -> str:
        if self.num_bytes is None:
            return f"{self.key} unknown"
        return f"{self.key} {format_bytes(self.num_bytes)} {'measured' if self.is_measured else 'estimated'}"


class BudgetError(RegistryError):
    """The states do not fit in memory; everything that had been built is released before this is raised.

    Attributes:
        needed_bytes: measured so far plus the estimates of the rest.
        is_lower_bound: True where some key's size is unknown, so that more than `needed_bytes` is needed.
        budget_bytes: the budget, or None where the device itself ran out of memory without one.
        needs: one `Need` per key, in build order.
        out_of_memory_key: the key under construction when the device ran out, else None.
    """

    def __init__(
        self, needs: Sequence[Need], budget_bytes: int | None, out_of_memory_key: Hashable | None = None
    ) -> None:
        self.needs = tuple(needs)
        self.budget_bytes = budget_bytes
        self.out_of_memory_key = out_of_memory_key
        self.needed_bytes = sum(need.num_bytes or 0 for need in self.needs)
        self.is_lower_bound = any(need.num_bytes is None for need in self.needs)
        super().__init__(self._message())

    def _message(self) -> str:
        at_least = "at least " if self.is_lower_bound else ""
        found = f"found that the runtime states need {at_least}{format_bytes(self.needed_bytes)}"
        if self.out_of_memory_key is not None:
            found += f", and the device ran out of memory while building {self.out_of_memory_key}"
        expected = "no budget was set" if self.budget_bytes is None else f"at most {format_bytes(self.budget_bytes)}"
        per_key = "; ".join(str(need) for need in self.needs)
        return (
            f"{found}; expected: {expected}. Per key: {per_key}. Fix: raise the budget or leave more memory free for it,"
            " capture fewer or smaller batch sizes, or build fewer keys."
        )


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for people and for arithmetic, such as `1.50 GiB (1610612736 bytes)`; below 1 KiB only the count."""
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.2f} {unit} ({num_bytes} bytes)"
