"""Prompt compression: long prompts are shortened to the parts that a small model attends to (lossy, and opt-in)."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from common.checkpoint import open_checkpoint
from common.compression import CHUNK, QUERIES, QUERY, SINKS, kept_spans, scored
from common.errors import PromptTooLongError, UsageError
from common.hub import resolve_model
from common.infill import Gap
from common.models import architecture
from common.options import LoadOptions
from generate.llm import LLM
from generate.server.task import Chat, Task, rendered

KEEP_RATIO = 0.05  # default
PIECE = 32_768  # maximum tokens that the drafter reads at once: it holds their keys and values, and the host a copy
GAP = " … "  # between parts of a text that were not adjacent


@dataclass(frozen=True)
class Compression:
    """Options of prompt compression.

    drafter    the model whose attention chooses, as --model takes it
    curve      points of a prompt's tokens and the share of its chunks that is kept, by rising tokens
    threshold  tokens from which a prompt is compressed
    """

    drafter: str
    curve: Sequence[tuple[int, float]]
    threshold: int

    def keep_ratio(self, tokens: int) -> float:
        """Return the share of chunks to keep of a prompt of `tokens` tokens, interpolated linearly between points."""
        lengths, shares = zip(*self.curve, strict=True)
        return float(np.interp(tokens, lengths, shares))


def compressor_for(backend: str | None, compression: Compression) -> "Compressor":
    """Load the drafter on a backend (None: the fastest for it); raises UsageError for a model that cannot score."""
    checkpoint = open_checkpoint(resolve_model(compression.drafter))
    context = architecture(checkpoint)[1].read_config(checkpoint).context
    least = SINKS + QUERY + CHUNK
    if context < least:
        held = f"a context of {context} tokens"
        raise UsageError(f"--prefill-drafter {compression.drafter} has {held}; at least {least} are supported")
    drafter = LLM(
        compression.drafter, LoadOptions(backend=backend, ctx=min(context, PIECE), parallel=1, cache_memory=0)
    )
    try:
        words = drafter.tokenizer.encode_plain("a b")
        drafter.attention_to(words, QUERIES)  # refused here if at all
    except BaseException:
        drafter.close()
        raise
    return Compressor(drafter, compression)


class Compressor:
    """Shortens prompts, one at a time."""

    def __init__(self, drafter: LLM, compression: Compression):
        self.drafter, self.compression = drafter, compression

    def shown(self) -> dict[str, Any]:
        """Return the options for /props."""
        points = [{"tokens": tokens, "keep_ratio": share} for tokens, share in self.compression.curve]
        given = {"drafter": self.compression.drafter, "backend": self.drafter.backend}
        return given | {"curve": points, "threshold": self.compression.threshold}

    def shorten(self, llm: LLM, task: Task, cancel: threading.Event) -> tuple[Task, int]:
        """Return `task` with its long prompts shortened, and the tokens that were left out.

        Prompts of token ids, gaps in a text, prompts that are echoed, conversations with tools, and prompts of which at
        least half is cached are not changed.

        cancel  ends the work at the drafter's next step, with BimetalError
        """
        if task.echo:
            return task, 0
        found = [self._shorter(llm, prompt, cancel) for prompt in task.prompts]
        return replace(task, prompts=[prompt for prompt, _ in found]), sum(dropped for _, dropped in found)

    def _shorter(
        self, llm: LLM, prompt: Chat | Gap | str | list[int], cancel: threading.Event
    ) -> tuple[Chat | Gap | str | list[int], int]:
        if isinstance(prompt, Gap):
            return prompt, 0
        ids = [self.drafter.tokenizer.encode_plain(text) for text in texts_of(prompt)]
        if not self._is_long(ids) or is_cached(llm, prompt):
            return prompt, 0
        texts, dropped = self._cut(ids, cancel)
        return with_texts(prompt, texts), dropped

    def shortened(self, texts: Sequence[str], cancel: threading.Event) -> tuple[list[str], int]:
        """Shorten the texts of one prompt if they are long together; return them and the tokens that were left out.

        cancel  ends the work at the drafter's next step, with BimetalError
        """
        ids = [self.drafter.tokenizer.encode_plain(text) for text in texts]
        return self._cut(ids, cancel) if self._is_long(ids) else (list(texts), 0)

    def _is_long(self, ids: Sequence[list[int]]) -> bool:
        """Test whether a prompt whose texts have these tokens is long enough to shorten."""
        tokens = sum(map(len, ids))
        chunks = -(-tokens // CHUNK)
        return (
            tokens >= max(self.compression.threshold, 1) and int(chunks * self.compression.keep_ratio(tokens)) < chunks
        )

    def _cut(self, ids: Sequence[list[int]], cancel: threading.Event) -> tuple[list[str], int]:
        tokens = [id for part in ids for id in part]
        attention = partial(self.drafter.attention_to, queries=QUERIES, cancel=cancel)
        ratio = self.compression.keep_ratio(len(tokens))
        spans = kept_spans(tokens, scored(tokens, attention, self.drafter.context), ratio)
        return list(self._parts(ids, spans)), len(tokens) - sum(end - first for first, end in spans)

    def _parts(self, ids: Sequence[list[int]], spans: Sequence[tuple[int, int]]) -> Iterator[str]:
        """Yield the shortened texts: `ids` are the tokens of each, `spans` the kept ranges of all texts joined."""
        at = 0
        for part in ids:
            inside = [(max(first - at, 0), min(end - at, len(part))) for first, end in spans]
            kept = [(first, end) for first, end in inside if first < end]
            texts = [self.drafter.tokenizer.decode(part[first:end]).strip("\ufffd") for first, end in kept]
            starts = "" if kept and kept[0][0] == 0 else GAP.lstrip()
            ends = "" if not kept or kept[-1][1] == len(part) else GAP.rstrip()
            yield starts + GAP.join(texts) + ends if part else ""
            at += len(part)


def texts_of(prompt: Chat | str | list[int]) -> list[str]:
    """List the texts of a prompt that may be shortened; [] for token ids, and for a conversation with tools."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, Chat) or prompt.options.get("tools"):
        return []
    return [message["content"] for message in prompt.messages if is_shortened(message)]


def is_shortened(message: Any) -> bool:
    """Test whether a message has a text that may be shortened: system messages are read whole."""
    return message["role"] != "system" and bool(message.get("content"))


def with_texts(prompt: Chat | str | list[int], texts: Sequence[str]) -> Chat | str:
    """Return the prompt with `texts` in place of the texts that `texts_of` lists."""
    if not isinstance(prompt, Chat):
        return texts[0]
    left = iter(texts)
    messages = [m | {"content": next(left)} if is_shortened(m) else m for m in map(dict, prompt.messages)]
    return replace(prompt, messages=messages)


def is_cached(llm: LLM, prompt: Chat | str | list[int]) -> bool:
    """Test whether at least half of a prompt need not be read."""
    try:
        [ready] = rendered(llm, Task([prompt], {}))
    except PromptTooLongError:
        return False
    return 2 * llm.matched_tokens(ready.tokens) >= len(ready.tokens)
