"""The sizes and rates of the memory, with their defaults."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DriftParams:
    """What the memory may hold and how it learns. Source: DRIFT paper, unless said otherwise.

    Attributes:
        num_slots: N, prototypes of all banks together. Memory: N * (4 H + 12 m + 16) bytes.
        num_tokens: m, tokens of the draft vocabulary that a prototype has a bias for.
        num_neighbours: k, prototypes that a hidden state is corrected by at most.
        gain: factor on the bias.
        rate: weight of the newest residual in a prototype that is met again.
        threshold: least cosine at which a prototype corrects a hidden state, or is taught by it. The paper has gain 0.6, rate
            0.1 and threshold 0.9; ours were chosen by measurement (scripts/RESULTS.md).
        clip: residuals are cut to [-clip, clip], in nats. Source: this project.
        num_banks: isolation keys that can have a bank at once; each is sure of num_slots // num_banks slots. Source:
            this project.
        num_spare: tokens outside the draft's vocabulary that each bank can propose. Source: this project.
    """

    num_slots: int = 4096
    num_tokens: int = 32
    num_neighbours: int = 8
    gain: float = 1.0
    rate: float = 0.3
    threshold: float = 0.95
    clip: float = 8.0
    num_banks: int = 8
    num_spare: int = 64
