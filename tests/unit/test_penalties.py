"""`adaptivespec.verify.penalties` against SGLang's rules, applied node by node in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.verify.penalties import Penalties, apply_penalties
from tests.unit.test_tree import ancestors, batches

VOCAB = 6
STOPS = [1, 4]


def penalised(row, output, frequency, presence, repetition, min_length):
    """One row of logits after an output."""
    row = list(row)
    for token in range(VOCAB):
        count = output.count(token)
        row[token] -= frequency * count + presence * (count > 0)
        if len(output) < min_length and token in STOPS:
            row[token] = -math.inf
        if count:
            row[token] = row[token] * repetition if row[token] < 0 else row[token] / repetition
    return row


@given(parents=batches(unreached=False), data=st.data())
def test_every_node_sees_the_output_and_its_own_path(parents, data):
    num_nodes = len(parents[0])
    token = st.integers(0, VOCAB - 1)
    tokens = [data.draw(st.lists(token, min_size=num_nodes, max_size=num_nodes)) for _ in parents]
    outputs = [data.draw(st.lists(token, max_size=5)) for _ in parents]
    values = [
        data.draw(st.sampled_from([(0.0, 0.0, 1.0, 0), (0.5, 0.0, 1.0, 4), (-0.3, 0.7, 1.3, 9)])) for _ in parents
    ]
    logits = torch.randn(len(parents), num_nodes, VOCAB)
    counts = torch.tensor([[float(output.count(t)) for t in range(VOCAB)] for output in outputs])
    frequency, presence, repetition, min_length = map(torch.tensor, zip(*values, strict=True))
    lengths = torch.tensor([len(output) for output in outputs])
    stops = torch.tensor([[*STOPS, -1]] * len(parents))
    found = logits.clone()
    apply_penalties(
        found,
        torch.tensor(parents),
        torch.tensor(tokens),
        Penalties(counts, lengths, frequency, presence, repetition, min_length, stops),
    )
    for b, row in enumerate(parents):
        for node in range(num_nodes):
            path = [tokens[b][each] for each in sorted(ancestors(row, node)) if each > 0]
            wanted = penalised(logits[b, node].tolist(), outputs[b] + path, *values[b])
            assert found[b, node].tolist() == pytest.approx(wanted, abs=1e-5)
