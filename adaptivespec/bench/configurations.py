"""Names of decoders, as arguments of SGLang's own launch command and ADAPTIVE's configuration."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adaptivespec.config import MarginConfig
from adaptivespec.config_checks import shape_range
from adaptivespec.errors import ConfigError
from adaptivespec.launch import speculation_args
from adaptivespec.reports import file_name
from adaptivespec.sglang_plugin.admin import KAPPA_KEY, SHAPE_KEY, STRICT, UNPIN
from adaptivespec.shapes import NO_SPECULATION, TreeShape

PLAIN = "plain"
ADAPTIVE_NAME = "ADAPTIVE"  # as in `sglang_plugin.resolve`, which takes torch to import
VALID_NAMES = (
    "plain, eagle3-default, eagle3-S-K-N, sglang-adaptive, adaptive, adaptive-static-S-K-N or talon, where S-K-N is "
    "num_steps-topk-num_draft_tokens; the last three also with +kappa=NUMBER, +fly, +drift, +drift=off and, but for static "
    "shapes, +range=NAME or +range=S-K-N:S-K-N"
)
UPSTREAM_ADAPTIVE = "--speculative-adaptive"
_EAGLE3, _STATIC = "eagle3-", "adaptive-static-"
_DRIFT = {"enabled": True}
_DRIFT_OFF: dict[str, Any] = {}  # a memory that requests do without


@dataclass(frozen=True)
class Configuration:
    """One decoder.

    Args:
        name: as the user wrote it.
        args: what its launch command has beyond the arguments of every server.
        adaptive: content of ``--speculative-adaptive-config`` beyond what follows; empty without that argument.
        pinned: the shape that an operator pins while it is measured; None to let the policy choose.
        kappa: the margin's, which an operator sets while it is measured; None: strict.
        does_without: its requests do without the memory that its server has.
    """

    name: str
    args: tuple[str, ...] = ()
    adaptive: dict[str, Any] = field(default_factory=dict)
    pinned: TreeShape | None = None
    kappa: float | None = None
    does_without: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is this package's worker, which can tell the shape of every step."""
        return ADAPTIVE_NAME in self.args

    @property
    def is_static(self) -> bool:
        """Whether it speculates with one shape for ever, and with nothing else that a baseline does not have."""
        return self.name.startswith((_EAGLE3, _STATIC)) and "+" not in self.name

    @property
    def is_strict(self) -> bool:
        """Whether it should say what plain decoding says."""
        return self.kappa is None and "verifier" not in self.adaptive

    @property
    def remembers(self) -> bool:
        """Whether what it answered before changes how it drafts."""
        return "drift" in self.adaptive and not self.does_without


@dataclass(frozen=True)
class ServerPlan:
    """One server and the decoders that it serves: several where they differ in what an operator can set alone.

    So what is compared is the same process: two that were started alike can differ by more than two decoders do.
    """

    configurations: tuple[Configuration, ...]

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments of its launch command, those of every server and the configuration file left out."""
        return self.configurations[0].args

    @property
    def adaptive(self) -> dict[str, Any]:
        """Content of its configuration file: states for every shape that will be pinned. Empty where it needs none."""
        config = self.configurations[0].adaptive
        pinned = list(dict.fromkeys(item.pinned for item in self.configurations if item.pinned))
        if not pinned:
            return config
        shapes = [shape.to_list() for shape in pinned]
        if all(item.pinned for item in self.configurations):
            return {"policy": "static", **config, "shape": {"start": shapes[0], "extra": shapes[1:]}}
        return {**config, "shape": {"extra": shapes}}

    def settings(self, item: Configuration, places: Mapping[str, int]) -> dict[str, float]:
        """What an operator has to set for one of its decoders; nothing where all need the same.

        Args:
            item: one of `configurations`.
            places: by shape, its place in the server's list.
        """
        found: dict[str, float] = {}
        if any(each.pinned for each in self.configurations):
            found[SHAPE_KEY] = places[str(item.pinned)] if item.pinned else UNPIN
        if any(each.kappa is not None for each in self.configurations):
            found[KAPPA_KEY] = STRICT if item.kappa is None else item.kappa
        return found

    @property
    def slug(self) -> str:
        """Its name as a file name."""
        return file_name(self.configurations[0].name)


def parse_configuration(name: str, draft: str) -> Configuration:
    """The decoder of a name.

    Args:
        name: see `VALID_NAMES`.
        draft: folder or hub name of the EAGLE-3 draft.

    Raises:
        ConfigError: no such name, or an illegal shape, kappa or range in it.
    """
    base, *extras = name.split("+")
    adaptive: dict[str, Any] = {}
    pinned = None
    if base in (PLAIN, "eagle3-default", "sglang-adaptive") or base.startswith(_EAGLE3):
        if extras:
            raise _unknown(name, f"+{extras[0]} beside {base}")
        return Configuration(name, _stock_args(name, draft))
    if base == "talon":
        adaptive["policy"] = "talon"
    elif base.startswith(_STATIC):
        pinned = TreeShape.parse(base.removeprefix(_STATIC), where=f"configuration {name}")
    elif base != "adaptive":
        raise _unknown(name, repr(name))
    for extra in extras:
        adaptive.update(_option(extra, name, adaptive))
    if pinned and "shape" in adaptive:
        raise _unknown(name, "+range beside a static shape")
    kappa = None
    if "verifier" not in adaptive:  # an operator cannot give back FLy what it has without a kappa
        kappa = adaptive.pop("margin", {}).get("kappa")
    does_without = adaptive.get("drift") == _DRIFT_OFF
    if does_without:
        adaptive["drift"] = _DRIFT
    return Configuration(name, speculation_args(ADAPTIVE_NAME, draft), adaptive, pinned, kappa, does_without)


def parse_configurations(names: Sequence[str], draft: str) -> list[Configuration]:
    """The decoders of some names, `PLAIN` first, whether it is among them or not.

    Raises:
        ConfigError: as `parse_configuration`, or a name that occurs twice.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                where="--configurations", found=f"{name} twice", expected="each name once", fix="drop one"
            )
    return [parse_configuration(name, draft) for name in dict.fromkeys((PLAIN, *names))]


def server_plans(configurations: Sequence[Configuration]) -> list[ServerPlan]:
    """The servers that serve these decoders, in their order; SGLang's have one each, and a memory is one decoder's and its
    twin's, whose requests do without it."""
    groups: dict[str, list[Configuration]] = {}
    for item in configurations:
        alike = [item.adaptive, str(item.pinned) if "drift" in item.adaptive else None]
        key = json.dumps(alike, sort_keys=True) if item.is_ours else item.name
        if item.remembers and any(other.remembers for other in groups.get(key, ())):
            key = item.name
        groups.setdefault(key, []).append(item)
    return [ServerPlan(tuple(group)) for group in groups.values()]


def _stock_args(name: str, draft: str) -> tuple[str, ...]:
    """Arguments of the decoders that are SGLang's own."""
    if name == PLAIN:
        return ()
    args = speculation_args("EAGLE3", draft)
    if name == "eagle3-default":
        return args
    if name == "sglang-adaptive":
        # It captures graphs on every device, and its start fails where there is nothing to capture with.
        graphs = () if _has_cuda() else ("--disable-cuda-graph",)
        return (*args, UPSTREAM_ADAPTIVE, "--speculative-eagle-topk", "1", *graphs)
    shape = TreeShape.parse(name.removeprefix(_EAGLE3), where=f"configuration {name}")
    if shape == NO_SPECULATION:
        raise _unknown(name, f"{shape}, which drafts nothing")
    return speculation_args("EAGLE3", draft, shape)


def _has_cuda() -> bool:
    import torch  # seconds, and needed for this name only

    return torch.cuda.is_available()


def _option(extra: str, name: str, before: dict[str, Any]) -> dict[str, Any]:
    """What a part after a plus sign sets."""
    key, separator, value = extra.partition("=")
    where = f"configuration {name}"
    if extra == "fly":
        found: dict[str, Any] = {"verifier": "fly"}
    elif extra in ("drift", "drift=off"):
        found = {"drift": _DRIFT if extra == "drift" else _DRIFT_OFF}
    elif key == "kappa" and separator:
        try:
            kappa = float(value)
        except ValueError:
            raise ConfigError(
                where=where, found=repr(extra), expected="kappa=NUMBER", fix="write for example +kappa=0.3"
            ) from None
        found = {"margin": {"kappa": MarginConfig(kappa=kappa).kappa}}
    elif key == "range" and separator:
        found = {"shape": {"range": range_in_json(value, where)}}
    else:
        raise _unknown(name, f"+{extra}")
    if found.keys() & before.keys():
        raise _unknown(name, f"+{key} twice")
    return found


def range_in_json(text: str, where: str) -> Any:
    """The value of `shape.range` that a user wrote as a name or as LOW:HIGH.

    Raises:
        ConfigError: it is neither.
    """
    low, colon, high = text.partition(":")
    ends: Any = text
    if colon:
        ends = {"low": TreeShape.parse(low, where).to_list(), "high": TreeShape.parse(high, where).to_list()}
    shape_range(ends, where)
    return ends


def _unknown(name: str, found: str) -> ConfigError:
    return ConfigError(where=f"configuration {name}", found=found, expected=VALID_NAMES, fix="correct the name")
