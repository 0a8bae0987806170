"""The verifiers by name: which rule, if any, may let a near miss stand in for the target's own token."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from adaptivespec.config import AdaptiveConfig
    from adaptivespec.verify.near_miss import Limits, Promotions

    Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Limits], Promotions]

VERIFIER_NAMES = ("margin", "fly", "strict")


def make_rule(config: "AdaptiveConfig") -> "Rule | None":
    """The rule of the configured verifier, as ``rule(parent, tokens, target_tokens, scores, limits)``; None for strict."""
    from adaptivespec.verify.near_miss import defer, promote

    margin, fly = config.margin, config.fly
    rules: dict[str, Rule | None] = {
        "margin": functools.partial(promote, max_promotions=margin.max_promotions, top_k_guard=margin.top_k_guard),
        "fly": functools.partial(defer, top=fly.top, min_entropy=fly.min_entropy, window=fly.window),
        "strict": None,
    }
    return rules[config.verifier]
