"""What the states of a registry cost."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PartReport:
    """A shared part: `num_bytes` and `seconds` count once, whatever the number of states that use it."""

    kind: str
    key: Hashable
    num_bytes: int
    seconds: float
    num_users: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "key": json_key(self.key),
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "num_users": self.num_users,
        }


@dataclass(frozen=True)
class StateReport:
    """One state: `num_bytes` and `seconds` are its own, without the shared `parts`, given as (kind, key)."""

    key: Hashable
    num_bytes: int
    seconds: float
    parts: tuple[tuple[str, Hashable], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": json_key(self.key),
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "parts": [[kind, json_key(key)] for kind, key in self.parts],
        }


@dataclass(frozen=True)
class RegistryReport:
    """All states and parts of a registry; the totals count each state and each part once."""

    backend: str
    states: tuple[StateReport, ...]
    parts: tuple[PartReport, ...]
    budget_bytes: int | None
    active_key: Hashable | None
    num_switches: int

    @property
    def total_bytes(self) -> int:
        return sum(s.num_bytes for s in self.states) + sum(p.num_bytes for p in self.parts)

    @property
    def total_seconds(self) -> float:
        return sum(s.seconds for s in self.states) + sum(p.seconds for p in self.parts)

    def bytes_with_parts(self, key: Hashable) -> int:
        """Bytes that the state of `key` would take alone: its own and those of all its parts. KeyError if unknown."""
        by_part = {(p.kind, p.key): p.num_bytes for p in self.parts}
        state = {s.key: s for s in self.states}[key]
        return state.num_bytes + sum(by_part[part] for part in state.parts)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types; tuple keys become lists, others that JSON lacks become their `str`."""
        return {
            "backend": self.backend,
            "states": [s.to_dict() for s in self.states],
            "parts": [p.to_dict() for p in self.parts],
            "total_bytes": self.total_bytes,
            "total_seconds": round(self.total_seconds, 3),
            "budget_bytes": self.budget_bytes,
            "active_key": json_key(self.active_key),
            "num_switches": self.num_switches,
        }


def json_key(key: Hashable) -> Any:
    """`key` as JSON: numbers, strings, booleans and None as they are, tuples as lists, the rest as `str(key)`."""
    if isinstance(key, tuple):
        return [json_key(item) for item in key]
    return key if key is None or isinstance(key, (bool, int, float, str)) else str(key)
