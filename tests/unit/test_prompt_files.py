from adaptivespec.prompt_files import chat_token_ids


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
