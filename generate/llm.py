"""LLM, the Python API of a loaded model."""

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from os import PathLike
from typing import Any, TypeVar

import numpy as np
from tqdm.auto import tqdm

from common import rules
from common.attention_scores import attention_to
from common.checkpoint import Checkpoint, open_checkpoint
from common.checks import (
    check_fits,
    check_head,
    check_not_empty,
    check_tokens,
    default_spec,
    default_window,
    speculation_of,
)
from common.decode.registry import check as check_decoder
from common.embeddings import embed
from common.engine import Engine
from common.errors import BimetalError, UsageError
from common.expert_stats import ExpertStats
from common.grammar import Grammars
from common.guide import Guide
from common.harmony import reply_parser, turn_ends
from common.histogram import Histogram
from common.hub import resolve_model
from common.infill import Gap, gap_prompt
from common.keywords import takes_options
from common.models import Model
from common.options import ChatOptions, GenerationOptions, LoadOptions, Sampling, TextOptions
from common.pieces import Logprob, Piece, PieceParser
from common.pooling import POOLINGS, Pooling, stated_pooling, states_unit
from common.prefix_cache import PrefixCache
from common.reading import Turns
from common.recommended import Recommended, recommended_sampling
from common.reply import Parser
from common.rerank import Prompts, Ranked, Reranker, find_reranker, frame_of, rank
from common.sampling import Sampler
from common.scores import logits_of, score
from common.sequence import Call
from common.text_grammar import text_grammar
from common.tokenizer import Tokenizer, load_tokenizer
from common.turns import Render, reply_header, turns_of
from common.warm_up import Size, warm_sizes
from generate.activity import Activity, activity_of, matched_tokens
from generate.backends import Placement, check_draft, choose, leave_thread
from generate.expert_streaming import save_profile
from generate.list_methods import Message, Prompt, chats, generates
from generate.loading import load_all, make_room, resolve_draft, with_adapters
from generate.machines import check_load, is_follower
from generate.notebook import in_notebook, model_card
from generate.owner_thread import OwnerThread
from generate.prefixes import open_prefixes
from generate.progress import PrefillBar
from generate.streams import DONE, AsyncStream, Reply, Start, Stream

T = TypeVar("T")
MOST_HEADERS = 64  # headers of replies that are remembered, by template and its options
BUSY = 1  # seconds between two tests of whether calls run
AHEAD = 4  # submitted replies of a list, as a multiple of those that run at once: no slot waits for the oldest
TEXTS = rules.Rule("a list of texts", lambda value: [*map(rules.TEXT.convert, rules.ITEMS.convert(value))])
PROMPTS, CONVERSATIONS = (str, Gap, list, tuple, np.ndarray), (list, tuple)  # the types of each of a list of them


def warm_up_beside(llm: "LLM") -> None:
    """Call `warm_up` in a thread that ends with the model."""

    def run() -> None:
        with suppress(BimetalError):  # the model is closed, or has no memory for larger steps: a call will report that
            llm.warm_up()

    threading.Thread(target=run, name="bimetal warm-up", daemon=True).start()


Running = weakref.WeakValueDictionary[int, threading.Event]  # what cancels each call, by its id


def _cancel(running: Running) -> None:
    for held in running.valuerefs():  # a list: calls may begin in other threads meanwhile
        if (cancel := held()) is not None:
            cancel.set()


def _shut(owner: OwnerThread, running: Running) -> None:
    if owner.is_here:
        _cancel(running)
        owner.close()


@dataclass(frozen=True)
class Prepared:
    """A prompt for `LLM.astream_prepared`, once or several times.

    tokens  of the prompt
    parser  makes the parser of one reply, given the text `begun` with which it has begun, if any; None: plain text
    turns   the turns that a chat template shows in it
    ends    tokens that end the reply; None: those of the tokenizer
    """

    tokens: list[int]
    parser: Callable[..., Parser] | None = None
    turns: Turns = field(default_factory=Turns)
    ends: frozenset[int] | None = None


class LLM:
    """A loaded model, made by `generate.load`. Any thread may call it; several replies are generated at the same time.

    recommended  sampling options that the model's files recommend, for options that a call does not give
    """

    tokenizer: Tokenizer
    recommended: Recommended

    def __init__(
        self,
        model: str | PathLike[str],
        options: LoadOptions | None = None,
        check: Callable[[Tokenizer], None] | None = None,
        window: GenerationOptions | None = None,
    ):
        """Load a model.

        check   called with the tokenizer before weights are loaded; an exception ends the loading
        window  default WeDLM options of calls, in place of the calibrated ones; a call may still give `spec`
        """
        options = self._options = options or LoadOptions()
        draft = None if options.draft is None else str(options.draft)
        check_draft(options.draft_device, draft)
        if is_follower(options):
            raise BimetalError("this process follows rank 0, which alone loads a model: run python -m generate on each")
        check_load(options)
        limit: Any = None if options.stream_experts else options.memory  # the option's rule has made it bytes
        where = options.devices, options.split, options.draft_device
        placement = Placement(*where, limit, options.ctx, options.tensor_parallel)
        self._progress = in_notebook() if options.progress is None else options.progress
        self.path = resolve_model(rules.PATH.accept("model", model), progress=self._progress)
        checkpoint = with_adapters(open_checkpoint(self.path), options.adapter, self._progress)
        self.tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
        self.recommended = recommended_sampling(checkpoint)
        if check is not None:
            check(self.tokenizer)
        if options.reranker:
            self.check_reranker()
        self.draft_path = None if draft is None else resolve_draft(draft, checkpoint, self._progress)
        self._running: Running = weakref.WeakValueDictionary()
        self._headers: dict[tuple[str, str], list[int]] = {}
        self._loaded: Engine | None = None
        self._owner = OwnerThread(f"bimetal {self.path.name}", leave_thread)
        self._shut = weakref.finalize(self, _shut, self._owner, self._running)  # also at exit, and when dropped
        self._loaded = self._owner.submit(lambda: self._load(checkpoint, options, placement, window)).result()

    def _load(
        self, checkpoint: Checkpoint, options: LoadOptions, placement: Placement, window: GenerationOptions | None
    ) -> Engine:
        model = load_all(checkpoint, self.draft_path, options, placement, self._progress)
        self.backend, self.architecture = model.ops.name, model.architecture
        self.default_spec = default_spec(model)
        if window is not None:
            chosen = speculation_of(window, self.default_spec, default_window(model))
            check_decoder(chosen, model, Sampler(Sampling()))
            model = replace(model, window=chosen.wedlm)
        self.peak_bytes = model.ops.peak_bytes()
        self.trained_context: int = model.config.context
        self.vocab_size: int = model.config.vocab
        room = make_room(model, options)
        self.context, self.parallel = room.context, room.parallel
        prefixes = self._open_prefixes(model, checkpoint, options)
        how = options.attention_window, options.queue, prefixes, room.tokens
        engine = Engine(model, self.tokenizer, self.context, self.parallel, *how)
        self._owner.turn, engine.deliver = engine.turn, self._owner.deliver
        return engine

    def _open_prefixes(self, model: Model, checkpoint: Checkpoint, options: LoadOptions) -> PrefixCache | None:
        checkpoints = [checkpoint, *([] if self.draft_path is None else [open_checkpoint(self.draft_path)])]
        placed = options.devices, options.split, options.draft_device, options.tensor_parallel
        facts = [choose(self.backend).description, *placed, options.attention_window, options.max_kv_size]
        return open_prefixes(model, checkpoints, options, facts)

    def __repr__(self) -> str:
        closed = "" if self._shut.alive else ", closed"
        return f"<LLM {self.path.name}: {self.architecture} on {self.backend}, context {self.context}{closed}>"

    def _repr_html_(self) -> str:
        facts = {
            "architecture": self.architecture,
            "backend": self.backend,
            "context": f"{self.context} of {self.trained_context} tokens",
            "memory": f"{self.peak_bytes / 2**30:.2f} GiB at most so far",
        }
        if self.draft_path is not None:
            facts["draft"] = "mtp" if self._options.draft == "mtp" else self.draft_path.name
        if self.recommended_options:
            facts["sampling"] = ", ".join(f"{name} {value:g}" for name, value in self.recommended_options.items())
        return model_card(self.path.name, facts)

    @property
    def activity(self) -> Activity:
        """Return counts and rates of the model's current work."""
        self._check_open()
        return activity_of(self._engine)

    @property
    def step_tokens(self) -> Histogram:
        """Return the histogram of steps by their tokens, which grows while the model works."""
        self._check_open()
        return self._engine.step_tokens

    @property
    def recommended_options(self) -> Mapping[str, Any]:
        """Return the sampling options that apply to calls which give none."""
        return self.recommended.options

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.path.name} cannot be copied or pickled, because one thread of this process owns the loaded model; "
            "share it between threads, or load it again"
        )

    # -- text ----------------------------------------------------------------------------------------------------------

    @takes_options(TextOptions)
    def stream(self, prompt: Prompt | Gap, options: TextOptions) -> Stream:
        """Generate a reply to `prompt` (text, token ids or a Gap), piece by piece."""
        check_one("stream", prompt)
        return Stream(self._owner, self._starter(self._prepare_text(prompt, options), options))

    @generates(TextOptions)
    def generate(self, prompt: Any, options: TextOptions) -> Any:
        """Generate the whole reply to `prompt` (text, token ids or a Gap), or to each of a list of them.

        The replies to a list are generated at the same time, and returned in its order. A list of numbers is the token
        ids of one prompt.
        """
        if is_many(prompt, PROMPTS):
            return self._replies(prepared("prompt", partial(self._prepare_text, options=options), prompt), options)
        with Stream(self._owner, self._starter(self._prepare_text(prompt, options), options)) as stream:
            return stream.reply()

    @takes_options(ChatOptions)
    def stream_chat(self, messages: Sequence[Message], options: ChatOptions) -> Stream:
        """Generate the assistant's reply to `messages`, piece by piece; stop strings apply to reasoning and calls too.

        messages  {"role": ..., "content": ...} each, as in OpenAI's API
        """
        check_one("stream_chat", messages)
        return Stream(self._owner, self._starter(self._prepare_chat(messages, options), options))

    @chats(ChatOptions)
    def chat(self, messages: Any, options: ChatOptions) -> Any:
        """Generate the assistant's whole reply to `messages`, or to each of a list of conversations.

        The replies to a list are generated at the same time, and returned in its order. Stop strings also apply to
        reasoning and tool calls.

        messages  {"role": ..., "content": ...} each, as in OpenAI's API
        """
        if is_many(messages, CONVERSATIONS):
            prepare = partial(self._prepare_chat, options=options)
            return self._replies(prepared("conversation", prepare, messages), options)
        with Stream(self._owner, self._starter(self._prepare_chat(messages, options), options)) as stream:
            return stream.reply()

    @takes_options(TextOptions)
    def astream(self, prompt: Prompt | Gap, options: TextOptions) -> AsyncStream:
        """Generate a reply to `prompt` (text, token ids or a Gap), for `async for`."""
        check_one("astream", prompt)
        return AsyncStream(self._owner, self._starter(self._prepare_text(prompt, options), options))

    @takes_options(TextOptions)
    async def agenerate(self, prompt: Prompt | Gap, options: TextOptions) -> Reply:
        """Generate the whole reply to `prompt` (text, token ids or a Gap), awaited."""
        check_one("agenerate", prompt)
        async with AsyncStream(self._owner, self._starter(self._prepare_text(prompt, options), options)) as stream:
            return await stream.reply()

    @takes_options(ChatOptions)
    def astream_chat(self, messages: Sequence[Message], options: ChatOptions) -> AsyncStream:
        """Generate the assistant's reply to `messages`, for `async for`."""
        check_one("astream_chat", messages)
        return AsyncStream(self._owner, self._starter(self._prepare_chat(messages, options), options))

    @takes_options(ChatOptions)
    async def achat(self, messages: Sequence[Message], options: ChatOptions) -> Reply:
        """Generate the assistant's whole reply to `messages`, awaited."""
        check_one("achat", messages)
        async with AsyncStream(self._owner, self._starter(self._prepare_chat(messages, options), options)) as stream:
            return await stream.reply()

    def prepare(self, prompt: Prompt | Gap) -> Prepared:
        """Encode and check `prompt` (text, token ids or a Gap); raises PromptTooLongError beyond the context."""
        if not isinstance(prompt, Gap):
            ids = self._ids(prompt)
            check_fits(len(ids), self.context, self.trained_context)
            return Prepared(ids)
        if prompt.extra is None and isinstance(prompt.prefix, str):
            self.tokenizer.check_fits(prompt.prefix + prompt.suffix, self.context)
        ids, turns = gap_prompt(self.tokenizer, prompt, self.context)
        check_tokens(ids, self.vocab_size)
        check_fits(len(ids), self.context, self.trained_context)
        return Prepared(ids, turns=turns, ends=self.tokenizer.end_ids | self.tokenizer.fim.ids)

    @takes_options(ChatOptions)
    def prepare_chat(self, messages: Sequence[Message], options: ChatOptions) -> Prepared:
        """Render and encode `messages`; raises PromptTooLongError beyond the context, UsageError without tokens."""
        return self._prepare_chat(messages, options)

    @takes_options(GenerationOptions)
    def astream_prepared(self, prompt: Prepared, options: GenerationOptions) -> AsyncStream:
        """Generate a reply to a prompt that was prepared before, for `async for`."""
        return AsyncStream(self._owner, self._starter(prompt, options))

    def guide(
        self,
        *,
        schema: Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        grammar: str | None = None,
    ) -> Callable[[], Guide]:
        """Make a value of the option `guide`, for any number of calls: a reply is what the one given argument allows.

        It applies from the first token: turn off reasoning. Raises UsageError for what llguidance (extra `grammar`)
        cannot follow.

        schema   JSON of this JSON schema; True: any JSON
        regex    text that matches this regular expression in whole, in the syntax of Rust's package regex
        choices  one of these texts
        grammar  text of this grammar, in GBNF (llama.cpp) or in llguidance's dialect of Lark
        """
        return self._grammars.guide(text_grammar(schema, regex, choices, grammar))

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab_size)

    def render(self, messages: Sequence[Message], tools: Any = None, think: bool | None = None, **template: Any) -> str:
        """Render `messages` by the model's chat template, up to where the assistant's reply begins."""
        return self.tokenizer.chat_prompt(messages, tools, think=think, **template).text

    # -- numbers -------------------------------------------------------------------------------------------------------

    def logits(self, prompt: Prompt, last: int | None = None) -> np.ndarray:
        """Compute the logits after each token of `prompt` (text or token ids): (T, vocab) float32.

        last  only the logits after the last `last` tokens; None: all
        """
        check_one("logits", prompt)
        return self._submit_steps(self._logits(prompt, last)).result()

    async def alogits(self, prompt: Prompt, last: int | None = None) -> np.ndarray:
        """Compute the logits after each token of `prompt` (text or token ids), as `logits` does, awaited."""
        check_one("alogits", prompt)
        return await asyncio.wrap_future(self._submit_steps(self._logits(prompt, last)))

    def score(self, prompt: Prompt, top: int = 0) -> list[Logprob]:
        """Compute log-probabilities of each token of `prompt` (text or ids) but the first, with `top` alternatives."""
        check_one("score", prompt)
        return self._submit_steps(self._scoring(prompt, top)).result()

    async def ascore(self, prompt: Prompt, top: int = 0) -> list[Logprob]:
        """Score each token of `prompt` (text or token ids) but the first, as `score` does, awaited.

        Cancelling the task that waits ends the work at the next step.
        """
        check_one("ascore", prompt)
        return await asyncio.wrap_future(self._submit_steps(self._scoring(prompt, top)))

    def attention_to(self, tokens: Sequence[int], queries: int, cancel: threading.Event | None = None) -> np.ndarray:
        """Measure the attention that the last `queries` of `tokens` give to each: (T,) float32.

        cancel  when set, ends the work at the next step, with BimetalError
        """
        queries = rules.whole(1).accept("queries", queries)
        job = partial(attention_to, tokens=tokens, queries=queries, context=self.context, cancel=cancel)
        return self._submit_steps(job).result()

    def embed(self, prompt: Any, pooling: str | None = None) -> np.ndarray:
        """Compute the embedding of `prompt` (text or token ids), (hidden,) float32; of a list (n, hidden).

        Its length is 1, unless the modules.json of the model's folder has no normalization.

        pooling  the hidden state after the last norm of the "last" token, or their "mean"; None: as the model's files
                 state, else "last"
        """
        many = is_many(prompt, (str, list, tuple, np.ndarray))
        jobs = [self._embedding(each, pooling) for each in (prompt if many else [prompt])]
        found = [self._submit_steps(job).result() for job in jobs]
        return np.stack(found) if many else found[0]

    async def aembed(self, prompt: Prompt, pooling: str | None = None) -> np.ndarray:
        """Compute the embedding of `prompt` (text or token ids), as `embed` does, awaited.

        Cancelling the task that waits ends the work at the next step.
        """
        check_one("aembed", prompt)
        return await asyncio.wrap_future(self._submit_steps(self._embedding(prompt, pooling)))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[Ranked]:
        """Rank `documents` by their relevance to `query`, from 0 to 1, the most relevant first, with a reranker.

        A score does not depend on the other documents.

        top_n        the most that are returned; None: all
        instruction  how a document meets the query, in a sentence; None: it answers a web search query
        truncate     cut the ends of documents beyond the context, in place of PromptTooLongError
        """
        return self._submit_steps(self._reranking(query, documents, top_n, instruction, truncate)).result()

    async def arerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
    ) -> list[Ranked]:
        """Rank `documents` by their relevance to `query`, as `rerank` does, awaited.

        Cancelling the task that waits ends the work at the next step.
        """
        steps = await asyncio.to_thread(self._reranking, query, documents, top_n, instruction, truncate)
        return await asyncio.wrap_future(self._submit_steps(steps))

    def check_reranker(self) -> None:
        """Refuse a model that is no reranker: BimetalError."""
        self._reranker  # noqa: B018

    def matched_tokens(self, prompt: Prompt) -> int:
        """Count the first tokens of `prompt` (text or token ids) that a slot or the prefix cache holds.

        A call may reuse fewer, counted by its `stats.cached_tokens`: those with a kept state.
        """
        ids = self._ids(prompt)
        return self._submit(lambda: matched_tokens(self._engine, ids)).result()

    # -- the owner thread ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel replies, end other work with BimetalError, and free the model; in a forked process, do nothing."""
        if self._shut.alive and self._owner.is_here:
            _cancel(self._running)
            freed = self._owner.put(self._free)
            self._shut()
            if freed.done():
                freed.result()

    @property
    def expert_stats(self) -> ExpertStats | None:
        """Return the counters of streamed experts so far; None if all experts are in memory.

        On CUDA they are of the time when a request last began or ended: the thread that owns the model reads them then.
        """
        engine = self._loaded
        stream = None if engine is None else getattr(engine.model, "expert_stream", None)
        return None if stream is None else stream.residency.counters.stats()

    def _free(self) -> None:
        """Drop the model; if `expert_profile` names a file, write how often each expert was used."""
        engine = self._loaded
        if engine is None:  # two threads have closed it
            return
        engine.close()
        _cancel(self._running)  # also calls since then
        engine.drain()
        stream = getattr(engine.model, "expert_stream", None)
        self._owner.turn = lambda: False
        self._owner.end_long()
        if engine.prefixes is not None:
            engine.prefixes.close()
        self._loaded = engine = None
        if stream is not None:
            stream.close()
            save_profile(self._options, stream)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._shut.alive:
            raise self._closed()
        self._owner.check()

    def _closed(self) -> BimetalError:
        return BimetalError(f"{self.path.name} is closed; load it again")

    @property
    def _engine(self) -> Engine:
        """Return the engine; raises BimetalError if another thread has closed the model since `_check_open`."""
        engine = self._loaded
        if engine is None:
            raise self._closed()
        return engine

    def warm_up(self) -> None:
        """Compile kernels and capture graphs for steps of each size while no call runs; returns when all are ready.

        Without a warm-up, the first call with a step of a new size does this work. Not for the owner thread.
        """
        for size in self._submit(lambda: warm_sizes(self._engine.model, self._engine.memory)).result():
            while not self._submit(partial(self._warm_up, size)).result():
                time.sleep(BUSY)

    def _warm_up(self, size: Size) -> bool:
        return self._engine.warm_up(size)  # in the owner thread: no other may keep the engine

    async def acheck(self) -> None:
        """Check that the model still runs: its thread answers, between two steps, and its device reports free memory.

        Raises the device's exceptions, and BimetalError for a closed model. Waits for at most one step.
        """
        await asyncio.wrap_future(self._submit(lambda: self._engine.model.ops.free_bytes()))

    def _submit(self, job: Callable[[], Any]) -> Any:
        self._check_open()
        return self._owner.submit(job)

    def _submit_steps(self, steps: Callable[[Model], Generator[None, None, Any]]) -> Any:
        """Have the owner thread run a generator over the model, alternating with steps of replies."""

        def run() -> Generator[None, None, Any]:
            return (yield from steps(self._engine.model))  # at its first step

        self._check_open()
        return self._owner.submit(run())

    def _logits(self, prompt: Prompt, last: int | None) -> Callable[[Model], Generator[None, None, np.ndarray]]:
        """Check the arguments of `logits`; return its steps, as a function of the model."""
        last, ids = None if last is None else rules.whole(1).accept("last", last), self._ids(prompt)
        return lambda model: logits_of(model, ids, self.context, last)

    def _scoring(self, prompt: Prompt, top: int) -> Callable[[Model], Generator[None, None, list[Logprob]]]:
        """Check the arguments of `score`; return its steps, as a function of the model."""
        top, ids = rules.whole(0).accept("top", top), self._ids(prompt)
        return lambda model: score(model, ids, self.context, top)

    @cached_property
    def _stated_pooling(self) -> str:
        return stated_pooling(open_checkpoint(self.path))

    @cached_property
    def _states_unit(self) -> bool:
        return states_unit(open_checkpoint(self.path))

    def _embedding(self, prompt: Prompt, pooling: str | None) -> Callable[[Model], Generator[None, None, np.ndarray]]:
        """Check the arguments of `embed`; return its steps, as a function of the model."""
        chosen = self._stated_pooling if pooling is None else pooling
        how = Pooling(rules.one_of(*POOLINGS).accept("pooling", chosen), self._states_unit)
        ids = self._ids(prompt)
        return lambda model: embed(model, ids, self.context, how)

    @cached_property
    def _reranker(self) -> Reranker:
        return find_reranker(open_checkpoint(self.path), self.tokenizer, self._options.reranker)

    def _reranking(
        self, query: str, documents: Sequence[str], top_n: int | None, instruction: str | None, truncate: bool
    ) -> Callable[[Model], Generator[None, None, list[Ranked]]]:
        """Check and encode the arguments of `rerank`; return its steps, as a function of the model."""
        reranker, texts = self._reranker, TEXTS.accept("documents", documents)
        query, truncate = rules.TEXT.accept("query", query), rules.FLAG.accept("truncate", truncate)
        instruction = None if instruction is None else rules.TEXT.accept("instruction", instruction)
        top_n = None if top_n is None else rules.whole(1).accept("top_n", top_n)
        self.tokenizer.check_fits(query + (instruction or ""), self.context)
        frame, limits = frame_of(reranker, self.tokenizer, query, instruction), (self.context, self.trained_context)
        check_fits(len(frame.shared) + len(frame.tail), *limits)

        def encoded(document: str) -> list[int]:
            if not truncate:
                self.tokenizer.check_fits(document, self.context)
            ids = frame.prompt(self.tokenizer, document, self.context if truncate else None)
            check_fits(len(ids), *limits)
            return ids

        prompts = Prompts(frame.shared, prepared("document", encoded, texts))
        return lambda model: rank(model, reranker, prompts, top_n)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self.tokenizer.check_fits(prompt, self.context)
            prompt = self.tokenizer.encode(prompt)
        return check_tokens(prompt, self.vocab_size)

    def _prepare_text(self, prompt: Prompt | Gap, options: TextOptions) -> Prepared:
        if options.suffix is None:
            return self.prepare(prompt)
        if isinstance(prompt, Gap):
            raise UsageError("suffix goes with a prompt of text or token ids; a Gap has its own")
        return self.prepare(Gap(prompt, options.suffix))

    def _prepare_chat(self, messages: Sequence[Message], options: ChatOptions) -> Prepared:
        """Render and encode a conversation, and find its turns: the parts that the next prompt may repeat."""
        how = dict(options.template or {}) | {"think": options.think, "parse_special": options.parse_special}
        render: Render = partial(self.tokenizer.chat_prompt, tools=options.tools, **how)
        prompt = render(messages, context=self.context)
        check_not_empty(prompt.tokens)
        check_fits(len(prompt.tokens), self.context, self.trained_context)
        parser = partial(reply_parser, prompt.template, prompt.text, options.tools)
        header = self._reply_header(render, prompt.template, how)
        ends = turn_ends(prompt.template, self.tokenizer)
        turns = turns_of(render, messages, prompt, header, ends, bool(options.tools))
        return Prepared(prompt.tokens, parser, turns)

    def _reply_header(self, render: Render, template: str, how: Mapping[str, Any]) -> list[int]:
        """Return the tokens by which a template with its options begins a reply; finding them takes 1 ms, once."""
        key = template, repr(sorted(how.items()))
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) >= MOST_HEADERS:
                self._headers.clear()
            header = self._headers[key] = reply_header(render)
        return header

    def _replies(self, prompts: Sequence[Prepared], options: GenerationOptions) -> list[Reply]:
        """Generate the replies to prompts, in their order; AHEAD times as many as run at once are submitted."""
        replies: list[Reply] = []
        most = min(AHEAD * self.parallel, self._options.queue)
        left, streams = iter(prompts), deque[Stream]()
        try:
            with tqdm(total=len(prompts), desc="replies", disable=not self._progress) as bar:
                for _ in prompts:
                    for prompt in islice(left, most - len(streams)):
                        streams.append(Stream(self._owner, self._starter(prompt, options, bar=False)))
                    replies.append(streams[0].reply())
                    streams.popleft()
                    bar.update()
        finally:
            for stream in streams:
                stream.cancel()
        return replies

    def _starter(self, prompt: Prepared, options: GenerationOptions, bar: bool = True) -> Start:
        """Return a function that submits the call: the owner thread puts pieces, then DONE or an exception.

        bar  whether progress over a long prompt may be shown
        """
        speculation_of(options, self.default_spec)  # refused in the caller's thread

        def start(put: Callable[[Any], None], cancel: threading.Event) -> None:
            self._check_open()
            check_head(self._engine.model.config)
            prefill, parse = PrefillBar(), PieceParser(prompt.parser and prompt.parser())

            def put_parsed(piece: Piece) -> None:
                self.peak_bytes = piece.stats.peak_bytes if piece.stats else self.peak_bytes
                if (parsed := parse.push(piece)) is not None:
                    put(parsed)

            def ended(error: BaseException | None) -> None:
                prefill.close()
                if isinstance(error, StopIteration | StopAsyncIteration):  # it would end the caller's loop
                    error = RuntimeError(f"a function of the call raised {type(error).__name__}")
                put(DONE if error is None else error)

            on_prefill = options.on_prefill or (prefill.update if self._progress and bar else None)
            how = replace(options, on_prefill=on_prefill)
            turns = prompt.turns
            marks = {turns.system: "system", turns.begun: "turn"}
            shown = turns.shared, marks, turns.replies
            call = Call(prompt.tokens, how, put_parsed, ended, cancel, *shown, prompt.ends)
            self._running[id(cancel)] = cancel
            self._engine.submit(call)
            self._owner.wake()

        return start


def is_many(value: Any, kinds: tuple[type, ...]) -> bool:
    """Test whether `value` is a list of prompts or conversations of the types `kinds`, and not a single one."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(each, kinds) for each in value)


def prepared(what: str, prepare: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
    """Prepare each of a list of prompts or conversations; an error names the number, from 0, of the one it is about."""
    found = []
    for number, value in enumerate(values):
        try:
            found.append(prepare(value))
        except BimetalError as error:
            error.args = (f"{what} {number} of the list: {error}",)
            raise
    return found


def check_one(method: str, value: Any) -> None:
    """Refuse a list of prompts or conversations, of which `method` takes one: UsageError."""
    chats = "chat" in method
    if is_many(value, CONVERSATIONS if chats else PROMPTS):
        what, lists = ("conversation", "chat") if chats else ("prompt", "embed" if "embed" in method else "generate")
        raise UsageError(
            f"{method} takes one {what}, and is given a list of {len(value)}; {lists} takes lists, and calls of "
            f"{method} run side by side"
        )
