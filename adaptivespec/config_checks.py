"""Checks of single config values: each returns the value, normalised, or raises `ConfigError` naming its key path."""

import difflib
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adaptivespec.errors import ConfigError
from adaptivespec.shapes import PRESETS, ShapeRange, TreeShape, preset

Check = Callable[[Any, str], Any]


class JsonObject(dict[str, Any]):
    """A parsed JSON object that remembers the keys written twice, so that they are reported with their full path."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.repeated = [name for name in self if names.count(name) > 1] if len(self) < len(pairs) else []


def key_path(section: str, key: object) -> str:
    name = key if isinstance(key, str) and key.isidentifier() and key.isascii() else ascii(key)
    return f"{section}.{name}" if section else str(name)


def checked_keys(data: Any, valid: list[str], section: str) -> Mapping[str, Any]:
    """`data`, known to be a mapping with no key outside `valid` and none given twice."""
    where = section or "config"
    if not isinstance(data, Mapping):
        raise ConfigError(
            where=where,
            found=reprlib.repr(data),
            expected=f"an object with keys among {', '.join(valid)}",
            fix="write {...} with the keys that you want to change",
        )
    for key in data:
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1) if isinstance(key, str) else []
            raise ConfigError(
                where=key_path(section, key),
                found="an unknown key",
                expected=f"one of {', '.join(valid)}",
                fix=f'did you mean "{close[0]}"?' if close else "remove it",
            )
    for key in getattr(data, "repeated", []):
        raise ConfigError(
            where=key_path(section, key),
            found="the key more than once",
            expected="each key once",
            fix="keep one of them",
        )
    return data


def number(above: float = -math.inf, low: float = -math.inf, high: float = math.inf) -> Check:
    """A check for a finite number `above < x`, `low <= x <= high`; gives a float."""
    bounds = f"above {above:g}, at most {high:g}" if above > low else f"from {low:g} to {high:g}"

    def check(value: Any, where: str) -> float:
        # Compared before conversion: an integer may be too large for a float. NaN fails every comparison.
        if type(value) not in (int, float) or not (above < value and low <= value <= high):
            raise ConfigError(
                where=where, found=reprlib.repr(value), expected=f"a number {bounds}", fix="change the value"
            )
        return float(value)

    return check


def integer(low: int, high: int) -> Check:
    def check(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(
                where=where,
                found=reprlib.repr(value),
                expected=f"an integer from {low} to {high}",
                fix="change the value",
            )
        return value

    return check


def flag(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise ConfigError(where=where, found=reprlib.repr(value), expected="true or false", fix="change the value")
    return value


def optional(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)


def zero_or(check: Check) -> Check:
    """0 passes, all else is the other check's."""
    return lambda value, where: 0 if type(value) is int and value == 0 else check(value, where)


def text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(where=where, found=reprlib.repr(value), expected="a text", fix="change the value")
    return value


def one_of(names: Sequence[str]) -> Check:
    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in names:
            raise ConfigError(
                where=where,
                found=reprlib.repr(value),
                expected=f"one of {', '.join(names)}",
                fix="name one of them",
            )
        return value

    return check


def shape_range(value: Any, where: str) -> ShapeRange:
    if isinstance(value, ShapeRange):
        return value
    if isinstance(value, str):
        return preset(value, where)
    ends = checked_keys(value, ["low", "high"], where)
    if len(ends) != 2:
        raise ConfigError(
            where=where,
            found=reprlib.repr(dict(ends)),
            expected=f'"low" and "high", or one of {", ".join(PRESETS)}',
            fix='write for example {"low": [3, 4, 4], "high": [7, 1, 8]}',
        )
    return ShapeRange(*(TreeShape.parse(ends[name], key_path(where, name)) for name in ("low", "high")))


def shape_list(value: Any, where: str) -> tuple[TreeShape, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(
            where=where,
            found=reprlib.repr(value),
            expected="a list of shapes",
            fix="write for example [[3, 1, 4], [5, 4, 8]]",
        )
    return tuple(TreeShape.parse(item, f"{where}[{index}]") for index, item in enumerate(value))
