import dataclasses
import json
import urllib.error
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.demo.command import parse
from adaptivespec.demo.configurations import (
    ADAPTIVE_NAME,
    COMMON_ARGS,
    PLAIN,
    Configuration,
    speculative_configurations,
)
from adaptivespec.demo.measure import ALL_SETS, Answer, Measurements, Pair, new_shapes, summarise
from adaptivespec.demo.prompts import GENERAL_QUESTIONS, WORD_PROBLEMS, human_eval_prompts, prompt_sets
from adaptivespec.demo.session import Plan, measure, pair_line, shape_note
from adaptivespec.launch import ServerFailedError
from adaptivespec.prompt_files import chat_token_ids
from tests.unit.fake_server import FIXED_SHAPE, FakeServer


def answer(speed: float | None = 10.0, ids=(1, 2, 3), **kwargs) -> Answer:
    return Answer(tuple(ids), "text", speed, **kwargs)


def pair(plain: Answer, other: Answer, configuration="ADAPTIVE", prompt_set="general") -> Pair:
    return Pair(configuration, prompt_set, 0, plain, other)


def test_the_answer_of_a_response():
    meta = {
        "completion_tokens": 3,
        "decode_throughput": 11.5,
        "spec_verify_ct": 2,
        "spec_num_correct_drafts": 1,
        "spec_shape_histogram": {"(3,4,4)": 2},
    }
    found = Answer.from_response({"output_ids": [5, 6, 7], "text": "abc", "meta_info": meta})
    assert found == Answer((5, 6, 7), "abc", 11.5, verify_steps=2, accepted=1, shape_steps={"(3,4,4)": 2})


def test_an_answer_of_one_token_has_no_speed():
    found = Answer.from_response({"output_ids": [5], "text": "a", "meta_info": {"completion_tokens": 1}})
    assert found == Answer((5,), "a", None)
    assert pair(found, answer()).ratio is None
    assert pair(answer(), found).ratio is None
    assert "no speed" in pair_line(pair(found, answer()))


def test_an_answer_without_its_speed_is_an_error():
    with pytest.raises(KeyError, match="decode_throughput"):
        Answer.from_response({"output_ids": [5, 6], "text": "a", "meta_info": {"completion_tokens": 2}})


def test_summary_of_three_pairs():
    pairs = [
        pair(answer(10.0), answer(20.0, verify_steps=10, accepted=10, shape_steps={"(7,1,8)": 10})),
        pair(answer(10.0), answer(12.0, ids=(1, 2), verify_steps=30, accepted=0, shape_steps={"(3,4,4)": 30})),
        pair(answer(20.0), answer(30.0, verify_steps=10, accepted=15, shape_steps={"(7,1,8)": 10})),
    ]
    found = summarise(pairs)
    assert (found.num_pairs, found.ratio, found.ratio_min, found.ratio_max) == (3, 1.5, 1.2, 2.0)
    assert found.tokens_per_s == 20.0
    # 25 accepted in 50 steps, and a bonus token in each: not the mean of 2, 1 and 2.5.
    assert found.accept_length == 1.5
    assert (found.num_identical, found.num_answers) == (2, 3)
    assert found.split_gap_max is None
    assert found.shape_steps == {"(3,4,4)": 30, "(7,1,8)": 20}


@pytest.mark.parametrize(
    ("plain", "other", "shared"),
    [((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3), (1, 5, 3), 1), ((1, 2, 3), (1, 2), 2), ((4,), (5,), 0)],
)
def test_where_answers_part(plain, other, shared):
    assert pair(answer(ids=plain), answer(ids=other)).shared_len == shared


def test_summary_of_nothing():
    found = summarise([])
    assert (found.num_pairs, found.ratio, found.ratio_min, found.ratio_max, found.accept_length) == (0, *[None] * 4)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=20))
def test_the_median_ratio_lies_between_the_extremes(speeds):
    found = summarise([pair(answer(plain), answer(other)) for plain, other in speeds])
    assert found.ratio_min <= found.ratio <= found.ratio_max
    assert found.num_pairs == len(speeds)


def test_headline_is_json_and_leaves_out_what_was_not_measured():
    found = Measurements(["EAGLE3 default", "ADAPTIVE"], ["general", "HumanEval"], problem="it was interrupted.")
    found.pairs = [pair(answer(10.0), answer(15.0))]
    line = json.loads(json.dumps(found.headline()))
    assert line["complete"] is False
    assert line["ADAPTIVE"]["general"]["ratio"] == line["ADAPTIVE"][ALL_SETS]["ratio"] == 1.5
    assert line["ADAPTIVE"]["HumanEval"]["ratio"] is None
    assert line["plain"] == {"general": {"tokens_per_s": 10.0}, "HumanEval": None, ALL_SETS: {"tokens_per_s": 10.0}}
    assert "EAGLE3 default" not in line


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_new_shapes_are_the_difference_of_two_readings(before, new):
    def count(shapes):
        return {shape: shapes.count(shape) for shape in set(shapes)}

    assert new_shapes(count(before), count(before + new)) == sorted(new)


def test_prompt_sets_hold_what_is_asked_for():
    assert {name: len(prompts) for name, prompts in prompt_sets(3).items()} == {
        "word problems": 3,
        "HumanEval": 3,
        "general": 3,
    }
    assert len(prompt_sets(99)["general"]) == len(GENERAL_QUESTIONS)
    assert len(prompt_sets(99)["word problems"]) == len(WORD_PROBLEMS)


def test_human_eval_prompts_are_functions_to_complete():
    prompts = human_eval_prompts()
    assert len(prompts) == 11  # every 16th of 164
    assert all("def " in prompt and '"""' in prompt for prompt in prompts)
    assert "has_close_elements" in prompts[0]


class PlainTokenizer:
    chat_template: str | None = None

    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(char) for char in text]

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return f"<{turns[0]['content']}>"


def test_prompts_take_the_chat_template_where_there_is_one():
    tokenizer = PlainTokenizer()
    assert chat_token_ids(tokenizer, ["a"]) == [[0, 97]]
    tokenizer.chat_template = "any"
    assert chat_token_ids(tokenizer, ["a"]) == [[60, 97, 62]]


def test_configurations_and_their_arguments():
    by_name = {item.name: item for item in speculative_configurations("DRAFT")}
    assert list(by_name) == ["EAGLE3 (3,1,4)", "EAGLE3 (7,1,8)", "EAGLE3 default", ADAPTIVE_NAME]
    assert by_name["EAGLE3 (7,1,8)"].args[-6:] == (
        *("--speculative-num-steps", "7"),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "8"),
    )
    assert by_name["EAGLE3 default"].args[1] == "EAGLE3"
    assert "--speculative-num-steps" not in by_name["EAGLE3 default"].args
    assert by_name[ADAPTIVE_NAME].args == (
        *("--speculative-algorithm", "ADAPTIVE"),
        *("--speculative-draft-model-path", "DRAFT"),
    )
    assert [item.name for item in speculative_configurations("DRAFT", quick=True)] == ["EAGLE3 default", ADAPTIVE_NAME]
    assert by_name["EAGLE3 (7,1,8)"].slug == "eagle3--7-1-8"


def test_command_line():
    quick = parse(["--quick", "--tokens", "5", "--", "--attention-backend", "triton"])
    assert (quick.prompts, quick.tokens, quick.rounds) == (1, 5, 1)
    assert quick.server_args == ["--attention-backend", "triton"]
    assert parse([]).prompts > 1
    with pytest.raises(SystemExit):
        parse(["--target", "x"])
    with pytest.raises(SystemExit):
        parse(["--rounds", "0"])


def test_shape_notes():
    fixed = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    assert shape_note({**fixed, "internal_states": [{}]}) == "always (5,4,8)"
    adaptive = {"internal_states": [{"adaptive": {"shapes": ["(3,4,4)", "(7,1,8)"]}}]}
    assert shape_note(adaptive) == "2 shapes, chosen at every step: (3,4,4) (7,1,8)"


class FakeDemoServer(FakeServer):
    """Answers like a server; `order` says who answered in which order."""

    order: list["FakeDemoServer"]

    def __init__(self, model, args, *, log: Path, timeout: float) -> None:
        super().__init__(model, args, log=log, timeout=timeout)
        self.is_adaptive = "ADAPTIVE" in args
        self.num_answers = 0

    def start(self) -> None:
        super().start()
        assert len(self.alive) <= 2, "more than two servers at a time"

    def get(self, path):
        assert path == "/server_info"
        state = {"adaptive": {"shapes": ["(3,4,4)"], "counts": {"steps_per_shape": {}}}} if self.is_adaptive else {}
        return {"internal_states": [state], **FIXED_SHAPE}

    def post(self, path, body, timeout):
        assert path == "/generate"
        assert body["sampling_params"]["temperature"] == 0
        self.num_answers += 1
        if self.num_answers > self.dies_after:
            raise urllib.error.URLError(ConnectionRefusedError("gone"))
        if body.get("return_logprob"):
            assert self.log.stem == "plain"
            assert body["input_ids"][1:] == [1]  # the prompt, and what both answers begin with
            return {"meta_info": {"output_top_logprobs": [[[-0.5, 2, None], [-0.75, 7, None]]]}}
        self.order.append(self)
        meta = {"completion_tokens": 2, "decode_throughput": 10.0 if self.log.stem == "plain" else 15.0}
        return {"output_ids": [1, 7 if self.log.stem == "differs" else 2], "text": "ab", "meta_info": meta}


class Silent:
    num_pairs = 0

    def say(self, text):
        pass

    def doing(self, text):
        pass

    def advance(self):
        self.num_pairs += 1


@pytest.fixture
def fake(monkeypatch):
    """A fresh kind of `FakeDemoServer`, with its own lists."""
    monkeypatch.setattr("adaptivespec.launch.DYING_SECONDS", 0)
    return type("Fake", (FakeDemoServer,), {"alive": [], "order": []})


def plan(tmp_path, configurations=("A", "B")) -> Plan:
    return Plan(
        target="TARGET",
        configurations=[Configuration(name, ("--flag", name)) for name in configurations],
        prompts={"x": [[1], [2]], "y": [[3]]},
        max_new_tokens=4,
        rounds=2,
        trace_prompt=[1],
        trace_tokens=4,
        server_args=["--extra"],
        logs=tmp_path,
    )


def run(fake, what: Plan) -> tuple[Measurements, Silent]:
    found, progress = Measurements([item.name for item in what.configurations], list(what.prompts)), Silent()
    try:
        measure(what, found, progress, make_server=fake)
    finally:
        assert fake.alive == [], "a server was left running"
    return found, progress


def test_a_session_measures_every_pair_and_leaves_no_server(fake, tmp_path):
    what = plan(tmp_path)
    found, progress = run(fake, what)
    assert len(found.pairs) == progress.num_pairs == what.num_pairs == 12
    assert [(p.configuration, p.prompt_set, p.prompt_index) for p in found.pairs[:6]] == [
        ("A", "x", 0),
        ("A", "y", 0),
        ("A", "x", 1),
    ] * 2
    assert {p.ratio for p in found.pairs} == {1.5}
    assert found.commands["A"].endswith("--flag A --extra")
    assert set(found.commands) == {PLAIN.name, "A", "B"}
    assert all(option in found.commands[PLAIN.name] for option in COMMON_ARGS)


def test_the_two_servers_take_turns_at_going_first(fake, tmp_path):
    run(fake, plan(tmp_path, ["A"]))
    names = [server.log.stem for server in fake.order]
    assert names[:2] == ["plain", "a"]  # warm-up
    assert names[2:] == ["plain", "a", "a", "plain"] * 3


def test_where_answers_differ_plain_is_asked_how_near_the_tie_was(fake, tmp_path):
    found, _ = run(fake, plan(tmp_path, ["A", "differs"]))
    assert {p.split_gap for p in found.of("A")} == {None}
    assert {p.split_gap for p in found.of("differs")} == {0.25}
    assert found.summaries()["differs"][ALL_SETS].split_gap_max == 0.25
    assert "part at token 2, where plain's two best are 0.25 nats apart" in pair_line(found.pairs[-1])


def test_a_server_that_dies_keeps_what_was_measured(fake, tmp_path):
    fake.dies_after = 4
    what = plan(tmp_path)
    found = Measurements(["A", "B"], ["x", "y"])
    with pytest.raises(ServerFailedError, match=r"ended with code 137; expected .*; fix: read .*\.log") as error:
        measure(what, found, Silent(), make_server=fake)
    assert error.value.log_tail == "last words"
    assert len(found.pairs) == 3
    assert fake.alive == []


def test_an_interruption_stops_both_servers(fake, tmp_path):
    def post(self, path, body, timeout):
        raise KeyboardInterrupt

    fake.post = post
    with pytest.raises(KeyboardInterrupt):
        run(fake, plan(tmp_path))


def test_plan_is_frozen(tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan(tmp_path).rounds = 3
