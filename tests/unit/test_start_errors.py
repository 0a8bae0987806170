"""`adaptivespec.sglang_plugin.start_errors`: our errors in one line, SGLang's and others' as they were."""

import sys

import pytest

from adaptivespec.errors import RefusedError
from adaptivespec.sglang_plugin import start_errors
from cuda_graphs import BudgetError, Need

REFUSED = RefusedError(reason="r", where="--tp-size", found="2", expected="1", fix="leave it out")
OURS = {
    "refused": (REFUSED, "adaptivespec: --tp-size: found 2; expected 1; fix: leave it out"),
    "budget": (
        BudgetError([Need("(7,1,8)", 3 << 30, True)], 1 << 30),
        "adaptivespec: found that the runtime states need 3.00 GiB",
    ),
}


@pytest.fixture
def scheduler(monkeypatch):
    """SGLang's module, with the function that is wrapped put back afterwards."""
    from sglang.srt.managers import scheduler

    monkeypatch.setattr(scheduler, "get_exception_traceback", scheduler.get_exception_traceback)
    start_errors.say_in_one_line_in_scheduler.cache_clear()
    start_errors.say_in_one_line_in_scheduler()
    start_errors.say_in_one_line_in_scheduler()  # by the CPU engine and by the worker
    yield scheduler
    start_errors.say_in_one_line_in_scheduler.cache_clear()


@pytest.mark.parametrize(("error", "line"), OURS.values(), ids=OURS)
def test_at_the_top_of_the_launch_command(monkeypatch, capsys, error, line):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: shown.append(args))
    start_errors.say_in_one_line()
    sys.excepthook(type(error), error, None)
    printed = capsys.readouterr().err
    assert printed.startswith(line)
    assert printed.count("\n") == 1
    assert shown == []
    other = KeyError("x")
    sys.excepthook(KeyError, other, None)
    assert shown == [(KeyError, other, None)]


@pytest.mark.parametrize(("error", "line"), OURS.values(), ids=OURS)
def test_in_the_schedulers_process(scheduler, error, line):
    try:
        raise error
    except type(error):
        said = scheduler.get_exception_traceback()
    assert said.startswith(line)
    assert "\n" not in said


def test_other_errors_keep_their_traceback(scheduler):
    try:
        raise KeyError("x")
    except KeyError:
        assert "Traceback" in scheduler.get_exception_traceback()
