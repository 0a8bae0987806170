"""Target and draft without a server: greedy answers, and what the draft does on them."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptivespec.draft_training.model import Eagle3Draft, load_draft
from adaptivespec.draft_training.target_states import target_forward
from adaptivespec.draft_training.ttt import Batch
from adaptivespec.offline.chain import Trace, trace_answer
from adaptivespec.prompt_files import PromptFile, chat_text
from adaptivespec.reports import write_whole


@dataclass(frozen=True)
class Answer:
    """Token ids of the templated prompt, and of the target's greedy answer without its end-of-text token."""

    prompt_ids: list[int]
    answer_ids: list[int]


class Pair:
    """Target and draft, in float32."""

    def __init__(self, target: str, draft: str) -> None:
        self._target = target
        self.tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().requires_grad_(False)
        self.draft: Eagle3Draft = load_draft(Path(draft)).requires_grad_(False)

    def answers(self, source: PromptFile, folder: Path, skip: int, count: int, max_new_tokens: int) -> list[Answer]:
        """The target's greedy answers to `count` prompts of a set after the first `skip`, made once and kept in a folder."""
        texts = [chat_text(self.tokenizer, row["text"]) for row in source.rows(count, skip)]
        digest = hashlib.sha256(json.dumps([self._target, max_new_tokens, texts]).encode()).hexdigest()
        file = folder / f"answers-{source.name}-{digest[:16]}.json"
        if not file.exists():
            found = []
            for start in tqdm(range(0, len(texts), 8), desc=f"{source.name}: answers"):
                found += self._answer(texts[start : start + 8], max_new_tokens)
            write_whole(file, json.dumps([vars(each) for each in found]).encode())
        return [Answer(**each) for each in json.loads(file.read_text())]

    def _answer(self, texts: list[str], max_new_tokens: int) -> list[Answer]:
        eos = self.model.generation_config.eos_token_id
        # The template writes the special tokens itself.
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=eos)
        prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        answers = out[:, inputs["input_ids"].shape[1] :].tolist()
        return [
            Answer(prompt, answer[: answer.index(eos)] if eos in answer else answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    @property
    def embed(self) -> Tensor:
        """The target's embedding table, ``[V, H]``, which is also its head."""
        embed: Tensor = self.model.model.embed_tokens.weight
        return embed

    def batch(self, answer: Answer) -> Batch:
        """An answer with the target's states, one row."""
        tokens = torch.tensor([answer.prompt_ids + answer.answer_ids])
        states, _ = target_forward(self.model.model, tokens)
        return Batch(tokens, states, torch.tensor([len(answer.prompt_ids)]), torch.tensor([tokens.shape[1]]))

    def trace(self, answer: Batch, num_steps: int, draft: Eagle3Draft | None = None) -> Trace:
        """What a draft does on an answer; None: the pair's own."""
        ids = answer.tokens[0].tolist()
        return trace_answer(draft or self.draft, self.embed, ids, answer.states[0], int(answer.prompt_lens), num_steps)
