"""`adaptivespec.cpu_engine.half_linear`: products through FBGEMM's fp16 kernels against float64."""

import logging

import pytest
import torch

from adaptivespec.cpu_engine import half_linear

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this build of torch has no FBGEMM"
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


HALF = [torch.bfloat16, torch.float16]


def random_weight(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5).to(dtype)


def reference(x, weight, bias=None) -> torch.Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def assert_close(out, expected, dtype) -> None:
    # One rounding to the output's dtype, and float32 sums whose order is free.
    unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), expected, rtol=unit * 1.01, atol=1e-5 + unit * 1e-2)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("lead", [(1,), (8,), (2, 3), (33,)])
def test_the_product_equals_float64_up_to_one_rounding(dtype, with_bias, lead):
    weight = random_weight(70, 96, dtype)
    bias = torch.randn(70).to(dtype) if with_bias else None
    x = torch.randn(*lead, 96).to(dtype)
    out = half_linear.linear(x, weight, bias)
    assert out.dtype == dtype
    assert out.shape == (*lead, 70)
    assert_close(out, reference(x, weight, bias), dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_many_rows_are_left_to_the_processors_own_instructions(monkeypatch, dtype):
    monkeypatch.setattr(half_linear, "_has_instructions", lambda asked: asked == torch.bfloat16)
    few, many = torch.empty(2, 8, 64, dtype=dtype), torch.empty(17, 64, dtype=dtype)
    assert half_linear.is_faster(few)
    assert half_linear.is_faster(few[0, 0])
    assert half_linear.is_faster(many) == (dtype == torch.float16)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("avx512_f", set()),  # emulates bfloat16, at several times the cost
        ("avx512_bf16", {torch.bfloat16}),
        ("amx_bf16", {torch.bfloat16}),
        ("avx512_fp16", {torch.float16}),
        ("amx_fp16", {torch.float16}),
    ],
)
def test_instructions_are_the_processors_own(monkeypatch, name, dtypes):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, name: True})
    assert {dtype for dtype in HALF if half_linear._has_instructions.__wrapped__(dtype)} == dtypes


def test_rows_do_not_depend_on_each_other():
    weight = random_weight(48, 64, torch.bfloat16)
    x = torch.randn(9, 64).bfloat16()
    alone, together = half_linear.linear(x[4:5], weight, None), half_linear.linear(x, weight, None)[4:5]
    # Sums in another order may round to the neighbouring bfloat16.
    torch.testing.assert_close(alone, together, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)


def test_small_bfloat16_weights_keep_an_absolute_error_of_fp16_subnormals():
    weight = torch.full((16, 64), 3e-6).bfloat16()  # below fp16's smallest normal number, 6e-5
    weight[0] = 1e-9
    x = torch.ones(1, 64).bfloat16()
    error = (half_linear.linear(x, weight, None).double() - reference(x, weight)).abs().max()
    assert error <= 64 * 2**-25


def test_the_largest_fp16_weight_is_packed_and_a_larger_one_is_not(caplog):
    x = torch.ones(1, 32).bfloat16()
    weight = random_weight(8, 32, torch.bfloat16)
    weight[3, 3] = 65280.0  # the largest bfloat16 below 65504
    assert_close(half_linear.linear(x, weight, None), reference(x, weight), torch.bfloat16)
    beyond = weight.clone()
    beyond[3, 3] = -65536.0
    with caplog.at_level(logging.WARNING):
        assert half_linear.linear(x, beyond, None) is None
        assert half_linear.linear(x, beyond, None) is None
    assert [record.getMessage() for record in caplog.records] == [
        "a weight of shape (8, 32) exceeds fp16's range; it is multiplied by torch's own kernel"
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_left_to_torch(value):
    weight = random_weight(8, 32, torch.bfloat16)
    weight[0, 0] = value
    assert half_linear.linear(torch.ones(1, 32).bfloat16(), weight, None) is None


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(1, 4), torch.ones(2, 4)),
        (torch.ones(1, 4), torch.ones(2, 4).bfloat16()),
        (torch.ones(1, 4).half(), torch.ones(2, 4).bfloat16()),
        (torch.ones(0, 4).half(), torch.ones(2, 4).half()),
    ],
    ids=["float32", "float32-input", "mixed", "no-rows"],
)
def test_other_forms_are_left_to_torch(x, weight):
    assert half_linear.linear(x, weight, None) is None


def test_a_change_in_place_counts_after_invalidate():
    weight = torch.nn.Parameter(random_weight(16, 32, torch.float16), requires_grad=False)
    x = torch.randn(2, 32).half()
    before = half_linear.linear(x, weight, None)
    weight.copy_(random_weight(16, 32, torch.float16, seed=1))
    assert half_linear.linear(x, weight, None).equal(before)  # the packed copy: why invalidate exists
    half_linear.invalidate()
    assert_close(half_linear.linear(x, weight, None), reference(x, weight), torch.float16)
    weight.fill_(float("inf"))
    half_linear.invalidate()
    assert half_linear.linear(x, weight, None) is None
    weight.fill_(0.5)
    half_linear.invalidate()
    assert half_linear.linear(x, weight, None) is not None


def test_tied_weights_are_packed_once(monkeypatch):
    calls = []
    prepack = torch.ops.quantized.linear_prepack_fp16

    class Counting:
        linear_dynamic_fp16 = torch.ops.quantized.linear_dynamic_fp16

        @staticmethod
        def linear_prepack_fp16(*args):
            calls.append(args)
            return prepack(*args)

    monkeypatch.setattr(half_linear.torch.ops, "quantized", Counting)
    embedding = torch.nn.Embedding(16, 32, dtype=torch.bfloat16)
    head = torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    head.weight = embedding.weight
    x = torch.randn(2, 32).bfloat16()
    outs = [half_linear.linear(x, module.weight, None) for module in (head, embedding, head)]
    assert len(calls) == 1
    assert outs[0].equal(outs[1])
    assert outs[0].equal(outs[2])
    half_linear.invalidate()
    half_linear.linear(x, head.weight, None)
    half_linear.linear(x, embedding.weight, None)
    assert len(calls) == 2
    assert_close(outs[0], reference(x, embedding.weight.detach()), torch.bfloat16)


def test_products_carry_no_gradient_history():
    weight = torch.nn.Parameter(random_weight(16, 32, torch.bfloat16))
    assert not half_linear.linear(torch.ones(1, 32).bfloat16(), weight, None).requires_grad
