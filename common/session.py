"""One timeline over a model: reuse what it has already read, read the rest of the prompt, decode the reply.

The command line, the Python API and the bench all generate through `Session.stream`.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from common.decode.alone import run_alone
from common.decode.registry import check
from common.decode.run import DecodeStats, Run, WedlmStats
from common.decode.speculative import new_tuner
from common.decode.tuner import Tuner
from common.decode.wedlm import most_unread
from common.decoders import DECODERS, PRESETS, Speculation, WedlmOptions
from common.errors import PromptTooLongError, UsageError
from common.models import Model
from common.models.dflash import Pair
from common.models.window import windowed
from common.ops import Array, Ops
from common.options import GenerationOptions
from common.pieces import Logprob, Piece, Stats
from common.sampling import Sampler
from common.step import Snapshot, Step
from common.stop import StopText
from common.tokenizer import Tokenizer

PREFILL_ROWS = Ops.prefill_rows  # rows of a step of which all logits are read


def check_tokens(tokens: Any, vocab: int) -> list[int]:
    """Return the token ids of a prompt as plain integers; raises UsageError for anything else, and if there are none.

    vocab  ids are 0 to vocab - 1
    """
    if hasattr(tokens, "tolist"):  # an array
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray):
        raise UsageError(f"the prompt is {tokens!r:.80}; it must be text or a sequence of token ids")
    if not tokens:
        raise UsageError("the prompt is empty; it must have at least one token")
    for token in tokens:
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise UsageError(f"the prompt has a token id {token!r:.80}; it must be a whole number")
        if not 0 <= token < vocab:
            raise UsageError(f"token id {token} is outside the vocabulary of {vocab}")
    return [int(token) for token in tokens]


def check_fits(tokens: int, context: int, trained: int) -> None:
    """Refuse a prompt of more `tokens` than the context holds, of a model that was trained for `trained`."""
    if tokens > context:
        raise PromptTooLongError(
            f"the prompt has {tokens} tokens and the context holds {context}; shorten it or raise ctx "
            f"(the model was trained for {trained})",
            tokens,
            context,
        )


def default_spec(model: Any) -> str:
    """The speculative mode of `model` where none is chosen: tree with a draft, wedlm with a mask token, else off."""
    if isinstance(model, Pair):
        return "tree"
    return "off" if getattr(model.config, "mask_id", None) is None else "wedlm"


def default_window(model: Any) -> WedlmOptions:
    """The window of `model` where none is chosen: as calibrated, else the preset `balanced`."""
    return getattr(model, "window", PRESETS["balanced"])


def speculation_of(options: GenerationOptions, default: str, window: WedlmOptions = PRESETS["balanced"]) -> Speculation:
    """Return the speculative mode that `options` choose; raises UsageError for options of other modes.

    default  the mode of the model, as `default_spec` has it
    window   its window, as `default_window` has it
    """
    kind = options.spec or default
    plain_topk = GenerationOptions.tree_topk
    given = {
        "tree_budget": options.tree_budget is not None,
        "chain_seed": options.chain_seed,
        "tree_topk": options.tree_topk != plain_topk,
        "wedlm_preset": options.wedlm_preset is not None,
        "wedlm_window": options.wedlm_window is not None,
        "wedlm_tau": options.wedlm_tau is not None,
        "wedlm_lambda": options.wedlm_lambda is not None,
        "wedlm_verify": options.wedlm_verify,
        "wedlm_order": options.wedlm_order is not None,
    }
    for name in (name for name, asked in given.items() if asked):
        if name in DECODERS[kind].takes:
            continue
        if kind == "off" and name not in DECODERS["wedlm"].takes:
            raise UsageError(f"{name} is for speculative decoding, which is off; give a draft or choose spec lookup")
        takers = ", ".join(row.name for row in DECODERS.values() if name in row.takes)
        raise UsageError(f"{name} is for spec {takers}, and spec is {kind}")
    return Speculation(kind, options.tree_budget, options.tree_topk, options.chain_seed, _window_of(options, window))


def _window_of(options: GenerationOptions, default: WedlmOptions) -> WedlmOptions:
    """The options of a window: those that are given, and the others of the preset that is named, else of `default`."""
    own: dict[str, Any] = {
        "window": options.wedlm_window,
        "tau": options.wedlm_tau,
        "penalty": options.wedlm_lambda,
        "order": options.wedlm_order,
        "verify": options.wedlm_verify,
    }
    base = default if options.wedlm_preset is None else PRESETS[options.wedlm_preset]
    return replace(base, **{k: v for k, v in own.items() if v is not None})


DEFAULTS = GenerationOptions()


class Session:
    """A model's state and the tokens committed to it. Not thread-safe: one owner at a time.

    tokens     the last prompt and its reply
    committed  those of them that the state holds
    fa_window  most positions that decoding attends to; None: all. Changes the text
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, context: int, fa_window: int | None = None):
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.decoding = model if fa_window is None else windowed(model, fa_window)
        self.tuners: dict[tuple[Speculation, bool], Tuner] = {}  # by options, and whether decoding is greedy
        self.state = self.model.new_state(self.context)
        self._empty = self.state.snapshot()
        self.reset()

    @property
    def committed(self) -> list[int]:
        return self.tokens[: self.state.length]

    def reset(self) -> None:
        self.state.restore(self._empty)  # a new state would have no graphs captured
        self.tokens: list[int] = []
        self.accepted, self.wedlm = DecodeStats(), WedlmStats()
        # what the next prompt may begin with, the state after it, and the logits where that is a whole prompt
        self.turn: tuple[list[int], Snapshot, Array | None] | None = None

    def stream(
        self,
        prompt: Sequence[int],
        options: GenerationOptions = DEFAULTS,
        cancel: threading.Event | None = None,
        shared: int | None = None,
    ) -> Iterator[Piece]:
        """Generate a reply to `prompt` (token ids), piece by piece.

        cancel  ends the reply at the next step, also during prefill
        shared  tokens of the prompt that the next one will begin with, whatever the reply; None: all
        """
        ids = self._check(prompt, options)
        speculation = speculation_of(options, default_spec(self.model), default_window(self.model))
        sampler = Sampler(options, ids)
        check(speculation, self.model, sampler)
        stream = self.model.expert_stream
        before = None if stream is None else stream.stats()
        started = time.perf_counter()
        cached = self._rewind(ids)
        end = len(ids) - self._unread(len(ids) - cached, speculation)
        shared = end if shared is None else min(shared, end)
        logits = self._prefill(ids, end, shared, cancel, options.on_prefill)
        first = last = time.perf_counter()
        new, pending = 0, Piece()
        text = StopText(options.stop)
        decoder = self.tokenizer.decoder()
        reason = "cancelled" if logits is None else "length"
        with closing(self._decode(logits, sampler, speculation)) as tokens:
            for token, row in tokens:
                last = time.perf_counter()
                if not new:
                    first = last
                new += 1
                self.tokens.append(token)
                if cancel is not None and cancel.is_set():
                    reason = "cancelled"
                    break
                if token in self.tokenizer.end_ids:
                    reason = "stop"
                    if options.logprobs is not None:
                        pending.end = Logprob.of(self.model.ops.read(row)[-1], token, options.logprobs)
                    break
                pending.tokens.append(token)
                if options.logprobs is not None:
                    pending.logprobs.append(Logprob.of(self.model.ops.read(row)[-1], token, options.logprobs))
                known = token < self.tokenizer.vocab_size  # a padded vocabulary ends in ids without text
                pending.text = text.push(decoder.push(token) if known else "")
                if text.stopped:
                    reason = "stop"
                    break
                if new == options.max_tokens:
                    break
                if pending.text:
                    yield pending
                    pending = Piece()
        if not text.stopped:
            pending.text += text.flush()  # a character that the end cuts in half is not shown
        pending.finish_reason = "stop" if text.stopped else reason
        pending.stop = text.stopped_by
        tuner = self.tuners.get((speculation, sampler.is_argmax))
        pending.stats = Stats(
            prompt_tokens=len(ids),
            cached_tokens=cached,
            new_tokens=new,
            prefill_seconds=first - started,
            decode_seconds=last - first,
            step_bytes=self.model.step_bytes,
            state_bytes=self.state.nbytes,
            peak_bytes=self.model.ops.peak_bytes(),
            accepted=self.accepted if speculation.drafts else None,
            wedlm=self.wedlm if speculation.kind == "wedlm" else None,
            experts=None if stream is None else stream.stats(before),
            plain_seconds=None if tuner is None else tuner.plain_seconds,
        )
        yield pending

    def _decode(
        self, logits: Array | None, sampler: Sampler, speculation: Speculation
    ) -> Generator[tuple[int, Array], None, None]:
        if logits is None:
            return
        self.accepted, self.wedlm = DecodeStats(), WedlmStats()
        unread = self.tokens[self.state.length :]
        run = Run(self.decoding, self.state, logits, sampler, list(self.tokens), speculation, unread=unread)
        run.stats, run.wedlm = self.accepted, self.wedlm
        if speculation.drafts and speculation.budget is None:
            run.tuner = self.tuners.setdefault((speculation, sampler.is_argmax), new_tuner(speculation, self.model))
        yield from run_alone(run)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits after each of `tokens`, read from an empty state: (T, vocab) float32."""
        return np.concatenate(list(self._rows(tokens)))

    def score(self, tokens: Sequence[int], top: int, cancel: threading.Event | None = None) -> list[Logprob]:
        """Score each of `tokens` but the first, after those before it, with the `top` best alternatives.

        cancel  ends the scores at the next step
        """
        scores: list[Logprob] = []
        for rows in self._rows(tokens):
            if cancel is not None and cancel.is_set():
                break
            following = tokens[len(scores) + 1 : len(scores) + 1 + len(rows)]
            scores += [Logprob.of(row, token, top) for row, token in zip(rows, following, strict=False)]
        return scores

    def _rows(self, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the logits after each of `tokens`, read from an empty state, a step of rows (T, vocab) at a time."""
        ids = check_tokens(tokens, self.model.config.vocab)
        check_fits(len(ids), self.context, self.model.config.context)
        state = self.model.new_state(self.context)
        for at in range(0, len(ids), PREFILL_ROWS):
            chunk = np.asarray(ids[at : at + PREFILL_ROWS], np.int32)
            yield self.model.ops.read(self.model.forward(state, Step.chain(chunk, at)))
            state.commit(np.arange(len(chunk)))

    def _rewind(self, prompt: list[int]) -> int:
        """Bring the state to a prefix of `prompt`, and return its length.

        A recurrent state cannot drop tokens, so the choices are the state as it is, as it was after what the last
        prompt shares with this one, or empty.
        """
        if self.committed == prompt[: self.state.length] and self.state.length < len(prompt):
            return self.state.length
        if self.turn:
            tokens, snapshot, logits = self.turn
            if tokens == prompt[: len(tokens)] and (len(tokens) < len(prompt) or logits is not None):
                self.tokens = list(tokens)
                self.state.restore(snapshot)
                return len(tokens)
        self.reset()
        return 0

    def _unread(self, new: int, speculation: Speculation) -> int:
        """Of `new` tokens at the prompt's end, those that prefill leaves to the decoder's first step.

        All of few, which saves a forward; of more the last one, as prefill then reads the others at its own speed. The
        decoder must see what prefill does: none with `fa_window`.
        """
        if speculation.kind != "wedlm" or self.decoding is not self.model:
            return 0
        most = most_unread(speculation.wedlm)
        return new if new <= most else min(most, 1)

    def _prefill(
        self,
        prompt: list[int],
        end: int,
        shared: int,
        cancel: threading.Event | None,
        on_prefill: Callable[[int, int], object] | None,
    ) -> Array | None:
        """Run the tokens up to `end` that the state lacks; the last row's logits (1, vocab), or None if cancelled.

        The logits are empty where the decoder reads tokens of the prompt. A state that has read past `shared` keeps
        what it could go back to before.
        """
        self.tokens = list(prompt)
        start = at = self.state.length
        whole = end == len(prompt)
        if at == len(prompt):  # the same prompt again
            assert self.turn
            return self.turn[2]
        logits: Array = ()
        if at == shared:
            self.turn = prompt[:at], self.state.snapshot(), None
        while at < end:
            if cancel is not None and cancel.is_set():
                return None
            n = min(self.model.ops.prefill_rows, (shared if at < shared else end) - at)
            chunk = np.asarray(prompt[at : at + n], np.int32)
            rows = slice(n - 1, n) if whole and at + n == end else slice(0, 0)
            logits = self.model.forward(self.state, Step.chain(chunk, at), rows)
            self.state.commit(np.arange(n))
            at += n
            if at == shared:
                self.turn = prompt[:at], self.state.snapshot(), logits if at == len(prompt) else None
            if on_prefill:
                on_prefill(at - start, end - start)
        return logits

    def _check(self, prompt: Sequence[int], options: GenerationOptions) -> list[int]:
        """Return the prompt's token ids; raises UsageError for what this model cannot do."""
        vocab = self.model.config.vocab
        tokens = check_tokens(prompt, vocab)
        if options.logprobs is not None and options.logprobs > vocab:
            raise UsageError(f"logprobs is {options.logprobs}; it must be at most the vocabulary of {vocab}")
        if (most := max(options.logit_bias or (), default=0)) >= vocab:
            raise UsageError(f"logit_bias has the token id {most}; the vocabulary has {vocab}")
        check_fits(len(tokens), self.context, self.model.config.context)
        return tokens
