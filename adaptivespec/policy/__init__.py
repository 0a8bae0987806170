"""Policies that choose the tree shape of each step: plain Python, without torch.

`make_policy` imports the configured policy only. A new policy is a module here and a line in `_POLICIES`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from adaptivespec.policy.base import PolicyCounts, ShapePolicy, StepResult

if TYPE_CHECKING:
    from adaptivespec.config import AdaptiveConfig
    from adaptivespec.shapes import TreeShape

__all__ = ["POLICY_NAMES", "PolicyCounts", "ShapePolicy", "StepResult", "make_policy"]

_POLICIES = {
    "dcs": ("adaptivespec.policy.dcs", "DcsPolicy"),
    "talon": ("adaptivespec.policy.talon", "TalonPolicy"),
    "static": ("adaptivespec.policy.static", "StaticPolicy"),
    "cycle": ("adaptivespec.policy.cycle", "CyclePolicy"),
}

POLICY_NAMES = tuple(_POLICIES)


def make_policy(config: "AdaptiveConfig", start_shape: "TreeShape") -> ShapePolicy:
    """A fresh policy as configured; `config` has already refused unknown names.

    Args:
        config: the effective config.
        start_shape: the shape before any request has a signal, see `adaptivespec.config.resolve_start`.
    """
    module, name = _POLICIES[config.policy]
    policy: ShapePolicy = getattr(import_module(module), name)(config, start_shape)
    return policy
