"""The configuration: frozen, complete, checked at construction. JSON in, effective values out.

JSON layout, every key optional:

    {"policy": "dcs",
     "shape": {"range": null, "start": null, "extra": []},
     "dcs": {"divisor": 0.5, "alpha": 0.3, "initial_rar": 0.5, "breaker_steps": 5},
     "talon": {"budget": null},
     "margin": {"kappa": null, "sampled": false, "max_promotions": 1, "top_k_guard": 0},
     "fly": {"top": 3, "min_entropy": 0.3, "window": 6},
     "verifier": "margin", "strict_only": false,
     "drift": {"enabled": false, "num_slots": 4096, "num_tokens": 32, "num_neighbours": 8, "gain": 1.0, "rate": 0.3,
               "threshold": 0.95, "clip": 8.0, "num_banks": 8, "num_spare": 64, "learn": true, "check_every": 16,
               "file": null},
     "graphs": {"memory_budget_gb": null, "max_batch_size": 16, "max_rows": null}}
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Self

from adaptivespec.config_checks import (
    JsonObject,
    flag,
    integer,
    number,
    one_of,
    optional,
    shape_list,
    shape_range,
    text,
    zero_or,
)
from adaptivespec.errors import ConfigError
from adaptivespec.policy import POLICY_NAMES, make_policy
from adaptivespec.section import Section
from adaptivespec.shapes import MAX_NUM_DRAFT_TOKENS, ShapeRange, TreeShape, default_range
from adaptivespec.verify.rules import VERIFIER_NAMES
from drift.params import DriftParams


@dataclass(frozen=True)
class ShapeConfig(Section):
    """Which tree shapes may be used.

    Args:
        range: the shapes that `dcs`, `talon` and `cycle` choose from. JSON: "paper" (the published range), "short" (chains
            of one to four drafts), or {"low": [num_steps, topk, num_draft_tokens], "high": [...]}, num_draft_tokens
            counting the root. null: "short" on a CPU, "paper" on an accelerator. Wider: more runtime states, more graph
            memory, more room to adapt. Source: AdaptiveSpec paper.
        start: the shape used before any request has a signal, and always by `static`. null: that of SGLang's three
            shape flags where they are given, else the low end of the range. Source: this project.
        extra: further shapes to keep runtime states for, [[num_steps, topk, num_draft_tokens], ...]; no policy chooses
            them, but an operator can pin them while the server runs, to compare. Source: this project.
    """

    SECTION: ClassVar[str] = "shape"
    range: ShapeRange | None = field(default=None, metadata={"check": optional(shape_range)})
    start: TreeShape | None = field(default=None, metadata={"check": optional(TreeShape.parse)})
    extra: tuple[TreeShape, ...] = field(default=(), metadata={"check": shape_list})

    @property
    def known_range(self) -> ShapeRange:
        """The range, of a config that has been told its device."""
        assert self.range is not None, "AdaptiveConfig.on comes first"
        return self.range


@dataclass(frozen=True)
class DcsConfig(Section):
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
class TalonConfig(Section):
    """What the policy `talon` may spend.

    Args:
        budget: most nodes, THE ROOT INCLUDED, that a request's tree may give the target to verify; 2 to 256, and not less
            than the start shape and the smallest shape of the range have. null: what the largest of the range has.
            Source: TALON, whose trees spend all of it.
    """

    SECTION: ClassVar[str] = "talon"
    budget: int | None = field(default=None, metadata={"check": optional(integer(2, MAX_NUM_DRAFT_TOKENS))})


@dataclass(frozen=True)
class MarginConfig(Section):
    """When a drafted token may stand in for the target's own. Lossy; off unless ``kappa`` is given.

    Args:
        kappa: least p(draft token) / p(top1) under the target at a mismatch; above 0, at most 1. null: strict. 1: exact
            ties alone. Published: 0.2. Requests may tighten it. Source: AdaptiveSpec paper.
        sampled: also for requests with a temperature, by their tempered and filtered distribution. Source: this project.
        max_promotions: in one step of one request; 1 is the published rule, 0 no limit.
        top_k_guard: promote only tokens among the target's so many likeliest; 0: no guard. Source: this project.
    """

    SECTION: ClassVar[str] = "margin"
    kappa: float | None = field(default=None, metadata={"check": optional(number(above=0.0, high=1.0))})
    sampled: bool = field(default=False, metadata={"check": flag})
    max_promotions: int = field(default=1, metadata={"check": integer(0, 64)})
    top_k_guard: int = field(default=0, metadata={"check": integer(0, 1_000_000)})


@dataclass(frozen=True)
class FlyConfig(Section):
    """When the verifier `fly` takes a miss. Source of all three: FLy's published code.

    Args:
        top: the target's likeliest tokens whose entropy is looked at; 2 to 1000.
        min_entropy: nats, above which the target is undecided; 0 to 10.
        window: positions, the mismatch included, that must then be the target's own; 1 to 64.
    """

    SECTION: ClassVar[str] = "fly"
    top: int = field(default=3, metadata={"check": integer(2, 1000)})
    min_entropy: float = field(default=0.3, metadata={"check": number(low=0.0, high=10.0)})
    window: int = field(default=6, metadata={"check": integer(1, 64)})


@dataclass(frozen=True)
class GraphConfig(Section):
    """What the runtime states may take. Without CUDA nothing is captured and none of it has an effect. All: this project.

    Args:
        memory_budget_gb: bytes that all captured states may take together, in units of 2**30 bytes, as SGLang logs
            them; above 0, at most 100000. Over it the server refuses to start. null: no limit of our own.
        max_batch_size: largest batch size to capture graphs for, larger batches run without; 1 to 4096. null: SGLang's own
            limit, which for eight shapes takes more memory than SGLang leaves beside the cache of keys and values.
        max_rows: most token rows, batch size times num_draft_tokens (the root counted), of a captured verify graph; 1 to
            1000000. States with more rows a request are captured for fewer batch sizes, at least for the smallest, and
            larger batches run without a graph. null: no limit by rows.
    """

    SECTION: ClassVar[str] = "graphs"
    memory_budget_gb: float | None = field(
        default=None, metadata={"check": optional(number(above=0.0, high=100_000.0))}
    )
    max_batch_size: int | None = field(default=16, metadata={"check": optional(integer(1, 4096))})
    max_rows: int | None = field(default=None, metadata={"check": optional(integer(1, 1_000_000))})

    @property
    def memory_budget_bytes(self) -> int | None:
        """The budget in bytes, rounded down; None for no limit."""
        return None if self.memory_budget_gb is None else int(self.memory_budget_gb * 2**30)


@dataclass(frozen=True)
class DriftConfig(Section):
    """The memory that corrects the draft from what verification reveals. Strict output stays what it is.

    Args:
        enabled: whether there is one.
        num_slots, num_tokens, num_neighbours, gain, rate, threshold, clip, num_banks, num_spare: see `drift.DriftParams`.
        learn: false: the memory is used as loaded and learns nothing.
        shared: whether there is one more bank, which requests that say ``share`` teach, and are corrected by where their
            own bank has nothing near.
        check_every: every so many steps of a request, one runs the other way, without correction where there is one, so
            that acceptance with and without is known and a tenant is switched to what accepts more; 0: never. 2 to
            1000000 else. Source: this project.
        file: path of a bank that is loaded at start where it exists, and written when an operator asks.
    """

    SECTION: ClassVar[str] = "drift"
    enabled: bool = field(default=False, metadata={"check": flag})
    num_slots: int = field(default=DriftParams.num_slots, metadata={"check": integer(1, 1_000_000)})
    num_tokens: int = field(default=DriftParams.num_tokens, metadata={"check": integer(1, 4096)})
    num_neighbours: int = field(default=DriftParams.num_neighbours, metadata={"check": integer(1, 64)})
    gain: float = field(default=DriftParams.gain, metadata={"check": number(above=0.0, high=10.0)})
    rate: float = field(default=DriftParams.rate, metadata={"check": number(above=0.0, high=1.0)})
    threshold: float = field(default=DriftParams.threshold, metadata={"check": number(low=0.0, high=0.9999)})
    clip: float = field(default=DriftParams.clip, metadata={"check": number(above=0.0, high=100.0)})
    num_banks: int = field(default=DriftParams.num_banks, metadata={"check": integer(1, 1024)})
    num_spare: int = field(default=DriftParams.num_spare, metadata={"check": integer(0, 4096)})
    learn: bool = field(default=True, metadata={"check": flag})
    shared: bool = field(default=False, metadata={"check": flag})
    check_every: int = field(default=16, metadata={"check": zero_or(integer(2, 1_000_000))})
    file: str | None = field(default=None, metadata={"check": optional(text)})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.params.num_banks > self.num_slots:
            raise ConfigError(
                where="drift.num_banks",
                found=f"{self.params.num_banks} banks for {self.num_slots} slots",
                expected="at least one slot a bank",
                fix="lower num_banks or raise num_slots",
            )

    @property
    def params(self) -> DriftParams:
        """What the memory itself needs to know."""
        params = DriftParams(**{item.name: getattr(self, item.name) for item in fields(DriftParams)})
        return replace(params, num_banks=self.num_banks + self.shared)


@dataclass(frozen=True)
class AdaptiveConfig(Section):
    """Everything that `--speculative-adaptive-config` can set.

    Args:
        policy: who chooses the shape of a step: "dcs" (draft confidence and recent acceptance), "talon" (draft
            confidence alone, under a budget of nodes; for comparison), "static" (always the start shape), "cycle" (every
            shape in turn; diagnostics). Source: AdaptiveSpec paper for dcs, TALON for talon.
        shape, dcs, talon, margin, fly, graphs, drift: see `ShapeConfig`, `DcsConfig`, `TalonConfig`, `MarginConfig`,
            `FlyConfig`, `GraphConfig`, `DriftConfig`.
        verifier: what may stand in for the target's own token: "margin" (near misses within ``margin.kappa``; nothing
            where that is null), "fly" (FLy: misses of an undecided target that the tokens after them bear out; also
            within ``margin.kappa`` where that is given), "strict" (nothing).
        strict_only: every answer is the target's own: nothing lossy here, at run time, or in a request. Source: this
            project.
    """

    policy: str = field(default="dcs", metadata={"check": one_of(POLICY_NAMES)})
    shape: ShapeConfig = field(default_factory=ShapeConfig, metadata={"check": ShapeConfig.check})
    dcs: DcsConfig = field(default_factory=DcsConfig, metadata={"check": DcsConfig.check})
    talon: TalonConfig = field(default_factory=TalonConfig, metadata={"check": TalonConfig.check})
    margin: MarginConfig = field(default_factory=MarginConfig, metadata={"check": MarginConfig.check})
    graphs: GraphConfig = field(default_factory=GraphConfig, metadata={"check": GraphConfig.check})
    fly: FlyConfig = field(default_factory=FlyConfig, metadata={"check": FlyConfig.check})
    drift: DriftConfig = field(default_factory=DriftConfig, metadata={"check": DriftConfig.check})
    verifier: str = field(default="margin", metadata={"check": one_of(VERIFIER_NAMES)})
    strict_only: bool = field(default=False, metadata={"check": flag})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strict_only and self.kappa_floor is not None:
            is_fly = self.verifier == "fly"
            raise ConfigError(
                where="strict_only",
                found="true beside " + ('verifier "fly"' if is_fly else f"margin.kappa {self.kappa_floor:g}"),
                expected="nothing that accepts other tokens than the target's own",
                fix=f"remove strict_only, or {'verifier' if is_fly else 'margin.kappa'}",
            )
        if self.verifier == "strict" and self.margin.kappa is not None:
            raise ConfigError(
                where="margin.kappa",
                found=f'{self.margin.kappa:g} beside verifier "strict"',
                expected="null, since it would have no effect",
                fix="remove one of them",
            )

    @property
    def kappa_floor(self) -> float | None:
        """Least ratio at which a token may stand in for the target's own at start: None strict, 0 any ratio."""
        return self.margin.kappa or 0.0 if self.verifier == "fly" else self.margin.kappa

    def on(self, device: str) -> Self:
        """The same with what depends on the device filled in. ``device``: as SGLang names it."""
        return replace(self, shape=replace(self.shape, range=self.shape.range or default_range(device)))

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
    return start or flags or config.shape.known_range.low


def selectable_shapes(config: AdaptiveConfig, start: TreeShape) -> tuple[TreeShape, ...]:
    """Every shape that runtime states are needed for, each once: what the policy may choose, then the extra ones.

    Raises:
        ConfigError: FLy's window is longer than every chain of drafts, so that it could never take a miss.
    """
    shapes = tuple(dict.fromkeys((*make_policy(config, start).shapes, *config.shape.extra)))
    deepest = max(shape.num_steps for shape in shapes)
    if config.verifier == "fly" and deepest < config.fly.window:
        raise ConfigError(
            where="fly.window",
            found=f"{config.fly.window} positions, and shapes of at most {deepest} drafts in a row",
            expected="a window that a draft can fill, or a miss is never taken",
            fix=f'lower it to {deepest} or less, or choose deeper shapes, such as shape.range "paper"',
        )
    return shapes
