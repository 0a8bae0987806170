"""The demo: its command line and prompts, and a run with servers that answer at once."""

import functools
import json

import pytest

from adaptivespec.bench import command as bench_command
from adaptivespec.bench import report
from adaptivespec.bench.run import measure
from adaptivespec.demo.command import DECODERS, QUICK_DECODERS, main, parse
from adaptivespec.demo.prompts import MOST_PROMPTS, human_eval_prompts, prompt_sets
from tests.unit.bench_fakes import fresh_fake
from tests.unit.test_prompt_files import PlainTokenizer


def test_prompt_sets_hold_what_is_asked_for():
    for count in (3, MOST_PROMPTS):
        found = {name: len(prompts) for name, prompts in prompt_sets(count).items()}
        assert found == {"word problems": count, "HumanEval": count, "general": count}


def test_human_eval_prompts_are_functions_to_complete():
    prompts = human_eval_prompts()
    assert len(prompts) == 11  # every 16th of 164
    assert all("def " in prompt and '"""' in prompt for prompt in prompts)
    assert "has_close_elements" in prompts[0]


def test_command_line():
    quick = parse(["--quick", "--tokens", "5", "--", "--attention-backend", "triton"])
    assert (quick.prompts, quick.tokens, quick.rounds) == (1, 5, 1)
    assert quick.server_args == ["--attention-backend", "triton"]
    assert parse([]).prompts > 1
    with pytest.raises(SystemExit):
        parse(["--target", "x"])
    for option in (["--rounds", "0"], ["--prompts", "0"], ["--prompts", str(MOST_PROMPTS + 1)]):
        with pytest.raises(SystemExit):
            parse(option)


class Tokenizer(PlainTokenizer):
    def decode(self, ids, skip_special_tokens):
        return f"words {ids}"


@pytest.mark.parametrize(("arguments", "names"), [([], DECODERS), (["--quick"], QUICK_DECODERS)])
def test_every_decoder_is_measured_beside_plain_and_a_second_run_begins_anew(
    tmp_path, capsys, monkeypatch, arguments, names
):
    fake = fresh_fake()
    most_alive = 0

    class Counted(fake):
        def start(self):
            nonlocal most_alive
            super().start()
            most_alive = max(most_alive, len(self.alive))

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: Tokenizer())
    monkeypatch.setattr("adaptivespec.command_line.end_on_sigterm", lambda: None)
    monkeypatch.setattr(bench_command, "measure", functools.partial(measure, make_server=Counted))
    monkeypatch.setattr(report, "figures", lambda store, summaries: {})
    pair = ["--target", "org/T", "--draft", "org/D", "--prompts", "2"]
    for _ in range(2):
        fake.order.clear()
        assert main([*arguments, *pair, "--out", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        line = json.loads(out.splitlines()[-1])
        assert line["complete"]
        assert {item["configuration"] for item in line["ratios"]} == {"plain", *names}
        num_decoders = len(names) + len(names) // 2  # plain's once for every two others
        assert line["cells"]["measured"] == line["cells"]["planned"] == num_decoders * 3 * 2
        assert fake.order, "nothing was measured anew"
        assert all(name in out for name in ("plain", *names))
    assert most_alive == 3
    assert fake.alive == []
    assert main([*pair, "--target", "/no/such/model"]) == 1
    assert "--target: found no config.json in /no/such/model; expected" in capsys.readouterr().err
    html = (tmp_path / "report.html").read_text()
    assert "words [1, 2, 3, 4]" in html
    assert "--extra" not in html
