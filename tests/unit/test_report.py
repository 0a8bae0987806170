"""Details of a request are put into its response once, whole, however SGLang streams it."""

from types import SimpleNamespace

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from adaptivespec.sglang_plugin.report import _add_details

OTHER, DETAIL = "one_a_token", "spec_shape_histogram"


def chunk(state: SimpleNamespace, tokens: list[str], details: list[dict]) -> dict:
    """`meta_info` of the second request of a batch."""
    meta: dict = {}
    info = {OTHER: [[], tokens], DETAIL: [[], details], "spec_margin": [[], []]}
    _add_details(TokenizerManager.update_request_meta_info, TokenizerManager, meta, state, info, 1, None)
    return meta


def test_details_are_kept_from_what_sglang_accumulates_a_token():
    state = SimpleNamespace(customized_info_accumulated={}, customized_info_reported_keys=set())
    assert chunk(state, ["a"], []) == {OTHER: ["a"]}
    assert chunk(state, ["b"], [{"(1,1,2)": 4}]) == {OTHER: ["a", "b"], DETAIL: {"(1,1,2)": 4}}
    # Of these keys streams repeat or slice the values.
    assert state.customized_info_reported_keys == {OTHER}
    assert state.customized_info_accumulated == {OTHER: ["a", "b"]}
