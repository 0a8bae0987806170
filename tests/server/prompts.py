"""Prompts of the server tests: general questions of our own and beginnings of functions."""

QUESTIONS = (
    "Why is the sky blue during the day but red at sunset?",
    "Explain how a bicycle stays upright when it moves.",
    "What should I pack for a three-day hike in the mountains?",
    "Describe how bread dough rises.",
    "How does a refrigerator keep food cold?",
    "Give me five tips for learning a new language.",
    "What is the difference between weather and climate?",
    "Write a short story about a lighthouse keeper and a storm.",
    "How do bees make honey?",
    "Explain what a prime number is to a ten-year-old.",
    "Why do cats purr?",
    "List the planets of the solar system with one fact about each.",
    "How can I sleep better at night?",
    "What happens to water when it boils?",
    "Describe a day in the life of a medieval blacksmith.",
    "How does a compass work?",
    "What makes a good apology?",
    "Explain the rules of chess in a few sentences.",
    "Why do leaves change colour in autumn?",
    "Plan a simple dinner for four people.",
    "What is inflation in an economy?",
    "How do vaccines protect us?",
    "Write a polite letter asking a neighbour to turn down the music.",
    "How was paper made before machines?",
)

CODE = (
    "def is_palindrome(text):\n",
    "def fibonacci(n):\n    # the n-th Fibonacci number\n",
    "class Stack:\n    # a stack with push, pop and peek\n",
    "def count_words(path):\n    # how often each word occurs in a file\n",
    "import math\n\ndef distance(a, b):\n",
    "def bubble_sort(numbers):\n",
)

# Code comes early, so that a short selection has both kinds.
ALL = (*QUESTIONS[:6], *CODE[:2], *QUESTIONS[6:], *CODE[2:])


def to_ids(tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt: code as it stands, a question through the model's chat template."""
    if prompt in CODE:
        text = prompt
    else:
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids
