"""Options of loading and of generating: frozen dataclasses whose fields have type, default, range and meaning.

`takes_options` of common/keywords.py makes keyword arguments of the fields. This module imports nothing heavy: the
command line's `--help` and `import generate` read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any

from common import rules
from common.decoders import DECODERS, MOST_WINDOW, ORDERS, PRESETS
from common.errors import UsageError
from common.rules import Rule

if TYPE_CHECKING:
    import numpy as np

    from common.guide import Guide

MOST_TOKENS = 2**31 - 1  # maximum of a context: positions are 32-bit integers
MOST_PRIORITY = 2**31 - 1
MOST_DRAFTED = 135  # draft tokens of a step on every backend: common.step.MAX_DECODE_ROWS minus the root


def option(default: Any, rule: Rule, meaning: str) -> Any:
    """Return a field of an options class; None in its place is the default."""
    return field(default=default, metadata={"rule": rule, "meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options whose values are checked when they are made; a value of None is the default. Raises UsageError."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            accepted = f.default if value is None else f.metadata["rule"].accept(f.name, value)
            object.__setattr__(self, f.name, accepted)


@dataclass(frozen=True, kw_only=True)
class Sampling(Options):
    """Options that draw a token from a row of logits; the defaults are greedy decoding without penalties."""

    temperature: float = option(0.0, rules.AT_LEAST_0, "divides the logits; 0 takes the most probable token (greedy)")
    top_p: float = option(1.0, rules.SHARE, "keep the most probable tokens that hold this share of the probability")
    top_k: int = option(0, rules.whole(0), "keep this many of the most probable tokens; 0 keeps all")
    min_p: float = option(0.0, rules.LEAST_SHARE, "keep tokens of at least this share of the best probability")
    repetition_penalty: float = option(
        1.0, rules.POSITIVE, "divides the logits of tokens seen in prompt or reply (Keskar et al., arXiv 1909.05858)"
    )
    frequency_penalty: float = option(0.0, rules.FINITE, "subtracted from a token's logit per occurrence in the reply")
    presence_penalty: float = option(0.0, rules.FINITE, "subtracted once from the logits of tokens in the reply")
    logit_bias: Mapping[int, float] | None = option(
        None, rules.BIAS, "added to the logits of tokens, by token id, after the penalties"
    )
    guide: "Callable[[], Guide] | None" = option(  # noqa: RUF009
        None, rules.CALLBACK, "makes the guide that restricts the tokens of one reply, after the bias (common/guide.py)"
    )
    reweigh: "Callable[[np.ndarray], np.ndarray] | None" = option(  # noqa: RUF009
        None,
        rules.CALLBACK,
        "replaces the weights of a draw, (vocab,) uint64, after min_p (common/infill.py)",
    )
    seed: int | None = option(None, rules.whole(0), "the same seed gives the same text; None draws a new one")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Sampling):
    """Options of a generated reply."""

    max_tokens: int | None = option(None, rules.whole(1), "most tokens of the reply; None: to the end of the context")
    stop: str | Sequence[str] = option(
        (),
        rules.texts("text or a list of texts, each of at least one character"),
        "strings that end the reply and are not part of it",
    )
    logprobs: int | None = option(
        None, rules.whole(0), "alternatives to list beside each token's log-probability; None: no log-probabilities"
    )
    priority: int = option(
        0, rules.whole(-MOST_PRIORITY, MOST_PRIORITY), "of replies that wait, those of higher priority begin first"
    )
    on_prefill: Callable[[int, int], object] | None = option(  # noqa: RUF009
        None,
        rules.CALLBACK,
        "called with (tokens read, tokens to read) during prefill, in the thread that owns the model",
    )
    spec: str | None = option(
        None,
        rules.one_of(*DECODERS),
        f"speculative mode: {'; '.join(f'{row.name}: {row.meaning}' for row in DECODERS.values())}. The text stays the "
        "same, except with wedlm. None: tree with a DFlash or DSpark draft, chain with other drafts, wedlm with a "
        "WeDLM model, else off",
    )
    tree_budget: int | None = option(
        None,
        rules.whole(1, MOST_DRAFTED),
        "draft tokens to verify per step; None: chosen from measurements while decoding",
    )
    tree_topk: int = option(8, rules.whole(1), "candidates that a tree considers at each position")
    chain_seed: bool = option(False, rules.FLAG, "begin each tree with the draft's most probable chain")
    wedlm_preset: str | None = option(
        None,
        rules.one_of(*PRESETS),
        f"window, tau and lambda at once: {'; '.join(f'{n}: {p.words}' for n, p in PRESETS.items())}. None: balanced",
    )
    wedlm_window: int | None = option(None, rules.whole(1, MOST_WINDOW), "masks per step; None: as the preset has it")
    wedlm_tau: float | None = option(
        None,
        rules.NOT_NEGATIVE,
        "entropy in nats below which masks are filled; 0: one mask per step. None: as the preset has it",
    )
    wedlm_lambda: float | None = option(
        None,
        rules.AT_LEAST_0,
        "nats added to a mask's entropy per position after the first mask; None: as the preset has it",
    )
    wedlm_verify: bool | None = option(
        None,
        rules.FLAG,
        "confirm each token by the next-token logits: the text of greedy decoding without windows; None: as the model "
        "was loaded, else False",
    )
    wedlm_order: str | None = option(
        None,
        rules.one_of(*ORDERS),
        "streaming: a full window of masks in each step; paper: filled positions count into it. None: streaming",
    )
    wedlm_sure: float | None = option(
        None,
        rules.NOT_NEGATIVE,
        "entropy in nats from which a filled mask is confirmed by the next-token logits, with greedy decoding; None: "
        "as the preset has it",
    )


@dataclass(frozen=True, kw_only=True)
class TextOptions(GenerationOptions):
    """Options of a reply that continues a text, or fills a gap in it."""

    suffix: str | None = option(
        None,
        rules.TEXT,
        "text after the reply, which then fills the gap between the prompt and it, for models with the tokens of "
        "fill-in-the-middle; None: the reply continues the prompt",
    )


# The other arguments of common.chat.chat_prompt and of a tokenizer's method over it.
RESERVED = ("self", "vocabulary", "messages", "tools", "think", "parse_special", "context", "template")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(GenerationOptions):
    """Options of a reply to messages."""

    think: bool | None = option(
        None, rules.FLAG, "whether to reason before the answer; None: as the model's chat template has it"
    )
    tools: Sequence[Mapping[str, Any]] | None = option(
        None,
        rules.ITEMS,
        "functions that the model may call, as in OpenAI's API. A call leaves the text once it is whole; a malformed "
        "call stays in the text as the model wrote it; one that max_tokens cuts has arguments that are incomplete JSON",
    )
    template: Mapping[str, Any] | None = option(
        None,
        rules.variables(*RESERVED),
        "further variables for the model's chat template",
    )
    parse_special: bool = option(
        False, rules.FLAG, "whether control tokens spelled out in messages count as such; by default they are text"
    )


CACHE_TYPES = ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq3_0", "lm2", "lm3", "lm4", "turboquant")
CACHE_SHORTHANDS = ("q8", "q4", "tq3", "auto")


@dataclass(frozen=True, kw_only=True)
class CacheChoice(Options):
    """Options of the KV cache's storage."""

    cache_type_k: str | None = option(
        None,
        rules.name_of(*CACHE_TYPES),
        f"format of cached keys: {', '.join(CACHE_TYPES)}; changes the text. None: the backend's own float type",
    )
    cache_type_v: str | None = option(
        None, rules.name_of(*CACHE_TYPES), "format of cached values, as cache_type_k; changes the text"
    )
    kv: str | None = option(
        None,
        rules.name_of(*CACHE_SHORTHANDS),
        "shorthand for both: q8 (q8_0, q8_0), q4 (lm4, lm4), tq3 (tq3_0, tq3_0), or auto: the first of the backend's "
        "own float type, q8_0 for both, q8_0 with lm4, lm4 for both and tq3_0 with which the context fits into memory",
    )
    kv_rotate_k: bool | None = option(
        None, rules.FLAG, "rotate keys (and queries) before they are encoded; None: where keys are below 8 bits"
    )
    kv_rotate_v: bool | None = option(
        None, rules.FLAG, "rotate values before they are encoded; None: in tq3_0, lm2, lm3, lm4 and turboquant"
    )
    kv_sinks: int | None = option(
        None,
        rules.whole(0),
        "first tokens that are read exactly; None: 4 where keys or values are below 8 bits, else 0",
    )
    kv_recent: int | None = option(
        None,
        rules.whole(0),
        "latest tokens that are read exactly; None: 128 where keys or values are below 8 bits, else 0",
    )
    kv_calibration: int | None = option(
        None,
        rules.none_or(64),  # a scale measured on fewer tokens would be noise
        "first tokens whose keys and queries give each channel's mean and scale for the keys after them; the tokens "
        "stay exact. 0: keys are encoded as they are. None: 512 where keys are below 8 bits",
    )
    kv_boundary: int = option(0, rules.whole(0), "first and last layers, counted among those with a cache, in q8_0")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv or self.cache_type_k or self.cache_type_v:
            return
        for of in fields(CacheChoice):
            if getattr(self, of.name) != of.default:
                raise UsageError(f"{of.name} goes with kv, cache_type_k or cache_type_v, none of which is given")


EXPERT_SWITCHES = {  # by option, those of which one must be on
    **dict.fromkeys(("expert_cache", "expert_pack"), ("stream_experts",)),
    "expert_vram": ("spark",),
    "expert_profile": ("stream_experts", "spark"),
}


@dataclass(frozen=True, kw_only=True)
class ExpertChoice(Options):
    """Options that hold the experts of a mixture. The text does not depend on them."""

    stream_experts: bool = option(
        False,
        rules.FLAG,
        "read a mixture's experts from its files while it runs, and keep some of them in memory: for models larger "
        "than memory",
    )
    expert_cache: int | str | None = option(
        None,
        rules.AMOUNT,
        "with stream_experts, memory for experts, in bytes or such as '8GB'. None: a quarter of the memory, or what is "
        "left of it",
    )
    memory: int | str | None = option(
        None,
        rules.AMOUNT,
        "memory for everything, in bytes or such as '16GB'. With stream_experts, experts get what is left of it; "
        "without, on CUDA the most that this process takes of each GPU's memory from then on, beside its context and "
        "libraries; elsewhere a model that needs more is refused. None: what is free",
    )
    expert_pack: str | PathLike[str] | None = option(  # noqa: RUF009
        None, rules.PATH, "with stream_experts, the file of `generate pack` to read experts from. None: the model's own"
    )
    expert_profile: str | PathLike[str] | None = option(  # noqa: RUF009
        None,
        rules.PATH,
        "with stream_experts or spark, a file of how often each expert was used, such as model.gguf.spark.csv: its "
        "most used are read first, and the file is written anew when the model is closed",
    )
    spark: bool = option(
        False,
        rules.FLAG,
        "on CUDA, hold all of a mixture's experts in pinned host memory, and hot ones in the GPU's memory as well",
    )
    expert_vram: int | str | None = option(
        None,
        rules.AMOUNT,
        "with spark, the GPU's memory for experts, in bytes or such as '10GB'. None: what everything else leaves",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spark and self.stream_experts:
            raise UsageError("spark and stream_experts exclude each other: experts come from memory, or from files")
        for name, switches in EXPERT_SWITCHES.items():
            if getattr(self, name) is not None and not any(getattr(self, switch) for switch in switches):
                off = "is off" if len(switches) == 1 else "are off"
                raise UsageError(f"{name} goes with {' or '.join(switches)}, which {off}")


@dataclass(frozen=True, kw_only=True)
class PrefixChoice(Options):
    """Options of the prefix cache: the common beginning of two prompts is read once."""

    cache_memory: int | str | None = option(
        None,
        rules.NO_AMOUNT,
        "host memory for states of earlier prompts and replies; 0: none. None: a tenth of the memory that is free, at "
        "most 8GiB",
    )
    cache_dir: str | PathLike[str] | None = option(  # noqa: RUF009
        None, rules.PATH, "a folder for such states, which outlive the process; None: none"
    )
    cache_disk: int | str | None = option(
        None, rules.AMOUNT, "most bytes of all files in cache_dir, in bytes or such as '20GB'. None: 20GB"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_disk is not None and self.cache_dir is None:
            raise UsageError("cache_disk goes with cache_dir, which is not given")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(CacheChoice, ExpertChoice, PrefixChoice):
    """Options that load a model."""

    backend: str | None = option(
        None,
        Rule("the name of a backend", rules.PATH.convert),
        "mlx, cuda or numpy; None: the fastest that this machine can run",
    )
    ctx: int | None = option(
        None,
        rules.whole(1, MOST_TOKENS),
        "context length: most tokens of prompt and reply together. None: as the model was trained, on CUDA as far as "
        "memory allows",
    )
    progress: bool | None = option(
        None, rules.FLAG, "show bars for downloads, loading and long prompts; None: in a notebook"
    )
    draft: str | PathLike[str] | None = option(  # noqa: RUF009
        None,
        rules.PATH,
        "what drafts for speculative decoding: mtp, the multi-token-prediction block in the model's own files; a "
        "DFlash, DSpark or EAGLE-3 draft, named as models are; or demo. The text stays the same",
    )
    adapter: str | Sequence[str] = option(
        (),
        rules.texts("the name of an adapter, or a list of names"),
        "LoRA adapters, added to the weights while the model runs: folders of PEFT or mlx-lm, GGUF files, or names on "
        "the Hub; NAME=X multiplies an adapter by X",
    )
    attention_window: int | None = option(
        None, rules.whole(1), "positions that decoding attends to; changes the text. None: all"
    )
    max_kv_size: int | None = option(
        None,
        rules.whole(8),
        "tokens whose keys and values are kept, the first four (attention sinks) and the latest; changes the text. "
        "None: all",
    )
    devices: Sequence[int] = option(
        (),
        rules.many("GPUs by number, such as (0, 1)", rules.whole(0)),
        "NVIDIA GPUs that share the model's layers in this order; empty: the first one alone",
    )
    split: Sequence[float] = option(
        (),
        rules.many("proportions above 0, such as (1, 3)", rules.POSITIVE),
        "proportions of the model's bytes, one per device; empty: as memory is free",
    )
    draft_device: int | None = option(
        None, rules.whole(0), "the GPU of the draft model, by number; None: the last of devices"
    )
    tensor_parallel: int | None = option(
        None,
        rules.whole(2),
        "number of GPUs (named by devices) or of processes (started by torchrun on NVIDIA GPUs, by mlx.launch on Macs) "
        "that share every layer of the model; None: each has layers of its own",
    )
    parallel: int | None = option(
        None,
        rules.whole(1),
        "replies that are generated at the same time, each with a state of its own; further ones wait. None: 8; on "
        "CUDA 4, which share memory for one context, or 1 if memory is short; 1 if steps cannot be shared (mlx-lm)",
    )
    reranker: bool = option(
        False, rules.FLAG, "the model is a Qwen3-Reranker, though its files do not state that: `rerank` takes it"
    )
    queue: int = option(256, rules.whole(1), "replies that may wait; further ones are refused")
