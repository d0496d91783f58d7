"""A model that writes what a test tells it to, behind the parts of generate.LLM that the server calls."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from tiny_chat import END
from tiny_chat import write as write_model

from common.checks import check_fits, check_tokens
from common.engine import STEP_TOKENS
from common.harmony import reply_parser
from common.histogram import Histogram
from common.options import ChatOptions, GenerationOptions
from common.pieces import Logprob, Piece, PieceParser, Stats
from common.tokenizer import load_tokenizer
from generate.activity import Activity
from generate.llm import Prepared

VOCABULARY = 258
WRITTEN: ContextVar[list[str]] = ContextVar("WRITTEN")  # the replies of the request that runs, where it is recorded
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }} name arguments{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


class Replies:
    """A stream of pieces that are there already."""

    def __init__(self, model: "Scripted", pieces: Iterator[Piece]):
        self._model, self._pieces, self._cancelled = model, pieces, False

    def cancel(self) -> None:
        self._cancelled = True

    async def __aenter__(self) -> "Replies":
        self._model.running += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._model.running -= 1

    def __aiter__(self) -> "Replies":
        return self

    async def __anext__(self) -> Piece:
        await asyncio.sleep(self._model.pause)
        for piece in self._pieces:
            if self._cancelled and not piece.finish_reason:
                continue
            self._model.steps += 1
            return piece
        raise StopAsyncIteration


class Scripted:
    """A model whose reply to everything is `text`, in pieces of `cut` characters.

    write    the reply to a prompt's text, where `text` is not enough
    finish   why it ends
    pause    seconds before each piece
    running  replies that are being read
    cached   share of each prompt that a slot is said to hold
    """

    def __init__(self, folder: Path, template: str = TEMPLATE, context: int = 4096, control: Sequence[str] = ()):
        write_model(folder, template=template, control=control)
        self.path = folder
        self.recommended_options: dict[str, Any] = {}
        self.default_spec = "off"
        self.tokenizer = load_tokenizer(folder, {"model_type": "llama"})
        self.context = self.trained_context = context
        self.vocab_size, self.architecture = VOCABULARY + len(control), "scripted"
        self.backend, self.parallel = "numpy", 2
        self.peak_bytes, self.expert_stats = 1 << 20, None
        self.text, self.cut, self.finish, self.stop = "Hello", 2, "stop", None
        self.write: Callable[[str], str] = lambda prompt: self.text
        self.pause, self.running, self.steps = 0.0, 0, 0
        self.error: Exception | None = None
        self.cached, self.step_tokens = 0.0, Histogram(STEP_TOKENS)
        self.prompts: list[str] = []
        self.options: list[dict[str, Any]] = []

    def render(self, messages: Sequence[Any], **more: Any) -> str:
        return self.tokenizer.chat_prompt(messages, **more).text

    def prepare(self, prompt: Any) -> Prepared:
        tokens = check_tokens(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, self.vocab_size)
        check_fits(len(tokens), self.context, self.context)
        return Prepared(tokens)

    def prepare_chat(self, messages: Sequence[Any], **options: Any) -> Prepared:
        chosen = ChatOptions(**options)
        prompt = self.tokenizer.chat_prompt(
            messages, chosen.tools, think=chosen.think, context=self.context, **(chosen.template or {})
        )
        self.prompts.append(prompt.text)
        check_fits(len(prompt.tokens), self.context, self.context)
        return Prepared(prompt.tokens, partial(reply_parser, prompt.template, prompt.text, chosen.tools))

    def astream_prepared(self, prompt: Prepared, **options: Any) -> Replies:
        chosen = GenerationOptions(**options)
        self.options.append(options)
        parse = PieceParser(prompt.parser and prompt.parser())
        return Replies(self, (parsed for piece in self._pieces(prompt, chosen) if (parsed := parse.push(piece))))

    def _pieces(self, prompt: Prepared, options: GenerationOptions) -> Iterator[Piece]:
        text = self.write(self.tokenizer.decode(prompt.tokens))
        if (written := WRITTEN.get(None)) is not None:
            written.append(text)
        new = len(text.encode())
        stats = Stats(len(prompt.tokens), 3, new, 0.01, 0.1, 1, 1, 1)
        parts = [text[at : at + self.cut] for at in range(0, len(text), self.cut)]
        for part in parts:
            tokens = self.tokenizer.encode(part, add_special_tokens=False)
            scores = [] if options.logprobs is None else [Logprob(t, -0.5, ((t, -0.5),)) for t in tokens]
            yield Piece(part, tokens=tokens, logprobs=scores)
        if self.error is not None:
            raise self.error
        end = None if options.logprobs is None else Logprob(self.tokenizer.token_to_id(END) or 0, -0.25)
        yield Piece(finish_reason=self.finish, stats=stats, stop=self.stop, end=end)

    async def ascore(self, tokens: Sequence[int], top: int = 0) -> list[Logprob]:
        return [Logprob(t, -1.0, ((t, -1.0),)[:top]) for t in tokens[1:]]

    def matched_tokens(self, tokens: Sequence[int]) -> int:
        return int(len(tokens) * self.cached)

    @property
    def activity(self) -> Activity:
        return Activity(self.running, 0, 0.0, 0, 0)

    def close(self) -> None:
        pass
