"""The configuration: frozen, complete, checked at construction. JSON in, effective values out.

JSON layout, every key optional:

    {"policy": "dcs",
     "shape": {"range": "default", "start": null, "extra": []},
     "dcs": {"divisor": 0.5, "alpha": 0.3, "initial_rar": 0.5, "breaker_steps": 5},
     "graphs": {"memory_budget_gb": null, "max_batch_size": null, "max_rows": null}}
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from adaptivespec.config_checks import (
    JsonObject,
    checked_keys,
    integer,
    key_path,
    number,
    optional,
    policy_name,
    shape_list,
    shape_range,
)
from adaptivespec.errors import ConfigError
from adaptivespec.policy import make_policy
from adaptivespec.shapes import PRESETS, ShapeRange, TreeShape


class _Section:
    """Base of the config dataclasses: every field is checked, and normalised, at construction."""

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
    if isinstance(value, _Section):
        return value.to_dict()
    if isinstance(value, ShapeRange):
        return {"low": value.low.to_list(), "high": value.high.to_list()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.to_list() if isinstance(value, TreeShape) else value


@dataclass(frozen=True)
class ShapeConfig(_Section):
    """Which tree shapes may be used.

    Args:
        range: the shapes that `dcs` and `cycle` move between. JSON: "paper" (the published range), "default" (today
            the same), or {"low": [num_steps, topk, num_draft_tokens], "high": [...]}, num_draft_tokens counting
            the root. Wider: more runtime states, more graph memory, more room to adapt. Source: AdaptiveSpec paper.
        start: the shape used before any request has a signal, and always by `static`. null: that of SGLang's three
            shape flags where they are given, else the low end of the range. Source: this project.
        extra: further shapes to keep runtime states for, [[num_steps, topk, num_draft_tokens], ...]; no policy chooses
            them, but an operator can pin them while the server runs, to compare. Source: this project.
    """

    SECTION: ClassVar[str] = "shape"
    range: ShapeRange = field(default=PRESETS["default"], metadata={"check": shape_range})
    start: TreeShape | None = field(default=None, metadata={"check": optional(TreeShape.parse)})
    extra: tuple[TreeShape, ...] = field(default=(), metadata={"check": shape_list})


@dataclass(frozen=True)
class DcsConfig(_Section):
    """How the policy `dcs` turns confidence into a place in the range. Source of all four: AdaptiveSpec paper.

    Args:
        divisor: d in DCS = clip(p_top1 * RAR / d, 0, 1); above 0, at most 10. Smaller: deeper trees sooner.
        alpha: weight of the newest step in RAR, the running acceptance ratio of a request; 0 to 1. 0 keeps it constant.
        initial_rar: RAR of a new request, and of one whose breaker has just recovered; 0 to 1.
        breaker_steps: consecutive steps without an accepted draft after which a request counts as DCS 0 until a draft
            is accepted again; 1 to 1000000.
    """

    SECTION: ClassVar[str] = "dcs"
    divisor: float = field(default=0.5, metadata={"check": number(above=0.0, high=10.0)})
    alpha: float = field(default=0.3, metadata={"check": number(low=0.0, high=1.0)})
    initial_rar: float = field(default=0.5, metadata={"check": number(low=0.0, high=1.0)})
    breaker_steps: int = field(default=5, metadata={"check": integer(1, 1_000_000)})


@dataclass(frozen=True)
class GraphConfig(_Section):
    """What the runtime states may take. Without CUDA nothing is captured and none of it has an effect. All: this project.

    Args:
        memory_budget_gb: bytes that all captured states may take together, in units of 2**30 bytes, as SGLang logs
            them; above 0, at most 100000. Over it the server refuses to start. null: no limit of our own.
        max_batch_size: largest batch size to capture graphs for; 1 to 4096. null: SGLang's own limit.
        max_rows: most token rows, batch size times num_draft_tokens (the root counted), of a captured verify graph; 1 to
            1000000. States with more rows a request are captured for fewer batch sizes, at least for the smallest, and
            larger batches run without a graph. null: no limit by rows.
    """

    SECTION: ClassVar[str] = "graphs"
    memory_budget_gb: float | None = field(
        default=None, metadata={"check": optional(number(above=0.0, high=100_000.0))}
    )
    max_batch_size: int | None = field(default=None, metadata={"check": optional(integer(1, 4096))})
    max_rows: int | None = field(default=None, metadata={"check": optional(integer(1, 1_000_000))})

    @property
    def memory_budget_bytes(self) -> int | None:
        """The budget in bytes, rounded down; None for no limit."""
        return None if self.memory_budget_gb is None else int(self.memory_budget_gb * 2**30)


@dataclass(frozen=True)
class AdaptiveConfig(_Section):
    """Everything that `--speculative-adaptive-config` can set.

    Args:
        policy: who chooses the shape of a step: "dcs" (draft confidence and recent acceptance), "static" (always the
            start shape), "cycle" (every shape in turn; diagnostics). Source: AdaptiveSpec paper for dcs.
        shape, dcs, graphs: see `ShapeConfig`, `DcsConfig`, `GraphConfig`.
    """

    policy: str = field(default="dcs", metadata={"check": policy_name})
    shape: ShapeConfig = field(default_factory=ShapeConfig, metadata={"check": ShapeConfig.check})
    dcs: DcsConfig = field(default_factory=DcsConfig, metadata={"check": DcsConfig.check})
    graphs: GraphConfig = field(default_factory=GraphConfig, metadata={"check": GraphConfig.check})

    @classmethod
    def from_json_file(cls, path: str | Path | None) -> Self:
        """The config in a JSON file, UTF-8; None gives the defaults.

        Raises:
            ConfigError: the file cannot be read, is not JSON, or `from_dict` refuses what it holds.
        """
        if path is None:
            return cls()
        expected = "a readable JSON file"
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=JsonObject)
        except OSError as error:
            raise ConfigError(
                where=str(path), found=error.strerror or str(error), expected=expected, fix="check path and permissions"
            ) from error
        except (ValueError, RecursionError) as error:
            # Not UTF-8, not JSON, or a number or nesting beyond Python's limits.
            raise ConfigError(
                where=str(path), found=f"invalid JSON ({error})", expected=expected, fix="correct the file"
            ) from error
        return cls.from_dict(data)


def resolve_start(config: AdaptiveConfig, flags: TreeShape | None) -> TreeShape:
    """The start shape: `shape.start`, else that of the server's three shape flags, else the low end of the range.

    Args:
        config: the effective config.
        flags: the shape that the user's own flags give; None where none was given.

    Raises:
        ConfigError: config and flags both name a shape, and not the same.
    """
    start = config.shape.start
    if start is not None and flags is not None and start != flags:
        raise ConfigError(
            where="shape.start",
            found=f"{start} in the config and {flags} in the server's flags",
            expected="one start shape",
            fix="remove shape.start, or --speculative-num-steps, --speculative-eagle-topk and "
            "--speculative-num-draft-tokens",
        )
    return start or flags or config.shape.range.low


def selectable_shapes(config: AdaptiveConfig, start: TreeShape) -> tuple[TreeShape, ...]:
    """Every shape that runtime states are needed for, each once: what the policy may choose, then the extra ones."""
    return tuple(dict.fromkeys((*make_policy(config, start).shapes, *config.shape.extra)))
