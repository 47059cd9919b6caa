"""What the model cards of Qwen's models for search make of their inputs, with transformers.

`Card` follows the reference code of the cards of Qwen3-Embedding, Qwen3-VL-Embedding,
Qwen3-Reranker, Qwen3-VL-Reranker and TomoroAI's ColQwen3: prompts, truncation, pooling and scores.
Images and videos are parts of the chat template's own kind.
"""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_tokenizer import CHAT_TEMPLATE, SPECIAL

Part = dict[str, Any]  # {"type": "image"}, {"type": "video"} or {"type": "text", "text": ...}
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


class Card:
    """The reference of one checkpoint."""

    def __init__(self, directory: Path) -> None:
        # The environment without torch has no transformers, either.
        transformers = pytest.importorskip("transformers")
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            extra_special_tokens=[name for name in SPECIAL if name != "<|endoftext|>"],
        )

    def embed_text(
        self, text: str, instruction: str | None = None, max_length: int | None = None
    ) -> list[int]:
        """Ids of Qwen3-Embedding's input."""
        if instruction is not None:
            text = f"Instruct: {instruction}\nQuery:{text}"
        return self._encode(text, max_length)

    def embed_vision(
        self, parts: Sequence[Part], instruction: str | None = None, max_length: int | None = None
    ) -> list[int]:
        """Ids of Qwen3-VL-Embedding's input, with one placeholder per image and video."""
        if instruction:
            instruction = instruction.strip()
            if instruction and not unicodedata.category(instruction[-1]).startswith("P"):
                instruction += "."
        system = instruction or "Represent the user's input."
        text = self._render(system, parts or [{"type": "text", "text": "NULL"}])
        return self._encode(text, max_length)

    def rank_text(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        """Ids of Qwen3-Reranker's pair."""
        instruction = instruction or (
            "Given a web search query, retrieve relevant passages that answer the query"
        )
        prefix = f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n"
        suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        before, after = (
            self.tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)
        )
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        left = None if max_length is None else max_length - len(before) - len(after)
        return [*before, *self._encode(pair, left), *after]

    def rank_vision(
        self,
        query: Sequence[Part],
        document: Sequence[Part],
        instruction: str | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        """Ids of Qwen3-VL-Reranker's pair; `max_length` counts the tokens of the model's turn. The
        card leaves these, and knows that they are five with Qwen's tokenizer.
        """
        instruction = instruction or (
            "Given a search query, retrieve relevant candidates that answer the query."
        )
        null = [{"type": "text", "text": "NULL"}]
        parts = [
            {"type": "text", "text": "<Instruct>: " + instruction},
            {"type": "text", "text": "<Query>:"},
            *(query or null),
            {"type": "text", "text": "\n<Document>:"},
            *(document or null),
        ]
        ids = self._encode(self._render(JUDGE, parts))
        if max_length is None:
            return ids
        turn = "<|im_end|>\n<|im_start|>assistant\n"
        last = len(self.tokenizer.encode(turn, add_special_tokens=False))
        return [*self._truncated(ids[:-last], max_length - last), *ids[-last:]]

    def late_text(self, text: str, max_length: int | None = None) -> list[int]:
        """Ids of TomoroAI's ColQwen3 for a text: `ColQwen3Processor.process_texts`."""
        ids = self._encode(text.strip() + "<|endoftext|>" * 10)
        return ids if max_length is None else [*ids[: max_length - 10], *ids[-10:]]

    def late_image(self, text: str = "") -> list[int]:
        """Ids for an image and perhaps a text, with one placeholder: its `__call__`."""
        prefix = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
        suffix, text = "<|im_end|><|endoftext|>", text.strip()
        return self._encode(f"{prefix} {text}{suffix}" if text else prefix + suffix)

    def _truncated(self, ids: list[int], max_length: int) -> list[int]:
        """As the card of the reranker: special tokens stay."""
        if len(ids) <= max_length:
            return ids
        special = set(self.tokenizer.all_special_ids)
        left = max_length - sum(token_id in special for token_id in ids)
        kept: list[int] = []
        for token_id in ids:
            if token_id in special:
                kept.append(token_id)
            elif left > 0:
                kept.append(token_id)
                left -= 1
        return kept

    def _render(self, system: str, parts: Sequence[Part]) -> str:
        return self.tokenizer.apply_chat_template(
            [
                {"role": "system", "content": [{"type": "text", "text": system}]},
                {"role": "user", "content": list(parts)},
            ],
            chat_template=CHAT_TEMPLATE.read_text(),
            add_generation_prompt=True,
            tokenize=False,
        )

    def _encode(self, text: str, max_length: int | None = None) -> list[int]:
        is_cut = max_length is not None
        return self.tokenizer(text, truncation=is_cut, max_length=max_length)["input_ids"]
