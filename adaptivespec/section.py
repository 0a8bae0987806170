"""A group of settings: frozen, complete, checked at construction. JSON in, effective values out."""

from dataclasses import fields
from typing import Any, ClassVar, Self

from adaptivespec.config_checks import checked_keys, key_path
from adaptivespec.shapes import ShapeRange, TreeShape


class Section:
    """Base of the settings dataclasses: every field is checked, and normalised, at construction."""

    SECTION: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = item.metadata["check"](getattr(self, item.name), key_path(self.SECTION, item.name))
            object.__setattr__(self, item.name, value)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The section that a parsed JSON object describes; keys left out keep their default.

        Raises:
            ConfigError: not an object, an unknown key, or a value that is not accepted; names the full key path.
        """
        valid = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        return cls(**checked_keys(data, valid, cls.SECTION))

    @classmethod
    def check(cls, value: Any, where: str) -> Self:
        """The check of a field that holds this section: an instance passes, all else is parsed."""
        return value if isinstance(value, cls) else cls.from_dict(value)

    def to_dict(self) -> dict[str, Any]:
        """The effective values, ready for JSON; `from_dict` of it gives an equal object."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, ShapeRange):
        return {"low": value.low.to_list(), "high": value.high.to_list()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.to_list() if isinstance(value, TreeShape) else value
