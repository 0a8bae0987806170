"""Constrained answers are legal and whole, and plain ones beside them are untouched (field case A4)."""

import json
import re

import jsonschema
import pytest

from tests.server.client import Client, shapes_used

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace", "Alan", "Edsger"]},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "skills": {"type": "array", "items": {"enum": ["chess", "logic", "music"]}, "minItems": 1, "maxItems": 3},
        "is_student": {"type": "boolean"},
    },
    "required": ["name", "age", "skills", "is_student"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "area": {"type": "object", "properties": {"km2": {"type": "integer", "maximum": 999}}, "required": ["km2"]},
    },
    "required": ["city", "area"],
    "additionalProperties": False,
}
REGEXES = (r"(yes|no), because [a-z ]{10,40}\.", r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}", r"\(\d{3}\) \d{3}-\d{4}( or \d{7})?")


def constraint(index: int) -> dict:
    """Every third request is plain, every third has a schema, every third a regex."""
    if index % 3 == 0:
        return {}
    if index % 3 == 1:
        return {"json_schema": json.dumps((PERSON, CITY)[index % 2])}
    return {"regex": REGEXES[index // 3 % len(REGEXES)]}


@pytest.mark.parametrize(
    "num_requests", [9, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=str
)
def test_mixed_concurrent_requests(ada: Client, ref: Client, prompts, num_requests):
    calls = [
        {"ids": prompts[index % len(prompts)], "max_new_tokens": 120 if constraint(index) else 40, **constraint(index)}
        for index in range(num_requests)
    ]
    answers = ada.generate_at_once(calls)
    checked = {"json_schema": 0, "regex": 0, "plain": 0}
    capped, compared = [], []
    for index, (call, answer) in enumerate(zip(calls, answers, strict=True)):
        if index % 3 == 0:
            assert answer.ids == ada.generate(**call).ids, f"request {index} was disturbed"
            checked["plain"] += 1
        elif answer.finish["type"] != "stop":  # the model goes on with blanks, which JSON allows
            capped.append((call, answer))
        else:
            if "json_schema" in call:
                jsonschema.validate(json.loads(answer.text), json.loads(call["json_schema"]))
                checked["json_schema"] += 1
            else:
                assert re.fullmatch(call["regex"], answer.text), answer.text
                checked["regex"] += 1
            compared.append((call, answer))
    print(f"{len(capped)} of {num_requests} met the cap")
    assert len(capped) <= num_requests / 10
    assert min(checked.values()) >= num_requests // 3 - len(capped), checked
    assert len(shapes_used(answers)) == 8
    # Constrained answers are also those of plain decoding, above all those that did not come to an end.
    compared = [*capped, *compared[:4]]
    expected = ref.generate_at_once([call for call, _ in compared])
    assert [answer.text for _, answer in compared] == [answer.text for answer in expected]


def test_openai_response_format(ada: Client):
    body = {
        "model": "any",
        "temperature": 0,
        "max_tokens": 120,
        "messages": [{"role": "user", "content": "Describe a student."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    }
    choice = ada.post("/v1/chat/completions", body).json()["choices"][0]
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert choice["finish_reason"] == "stop"
