"""Checks of a call before anything runs: token ids, the speculative mode and its options."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from common.decoders import PRESETS, Speculation, WedlmOptions, check_taken
from common.errors import PromptTooLongError, UsageError, shown
from common.models.pair import Pair
from common.options import GenerationOptions


def check_tokens(tokens: Any, vocab: int) -> list[int]:
    """Return the token ids of a prompt as plain integers; raises UsageError for anything else, and if there are none.

    vocab  ids are 0 to vocab - 1
    """
    if hasattr(tokens, "tolist"):  # an array
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray):
        raise UsageError(f"the prompt is {shown(tokens)}; it must be text or a sequence of token ids")
    check_not_empty(tokens)
    for token in tokens:
        if isinstance(token, Mapping):
            raise UsageError("the prompt is a list of messages; chat and stream_chat take messages")
        if isinstance(token, str):
            raise UsageError(f"the prompt has the text {shown(token)} among token ids; it must be text or token ids")
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise UsageError(f"the prompt has a token id {shown(token)}; it must be a whole number")
        if not 0 <= token < vocab:
            raise UsageError(f"token id {shown(int(token))} is outside the vocabulary of {vocab}")
    return [int(token) for token in tokens]


def check_not_empty(tokens: Sequence[int]) -> None:
    """Refuse a prompt without tokens: UsageError."""
    if not tokens:
        raise UsageError("the prompt is empty; it must have at least one token")


def check_fits(tokens: int, context: int, trained: int) -> None:
    """Refuse a prompt of more `tokens` than the context holds, of a model that was trained for `trained`."""
    if tokens > context:
        raise PromptTooLongError(
            f"the prompt has {tokens} tokens and the context holds {context}; shorten it or raise ctx "
            f"(the model was trained for {trained})",
            tokens,
            context,
        )


def check_head(config: Any) -> None:
    """Refuse a model without a head, which has no logits: UsageError."""
    if not getattr(config, "has_head", True):
        raise UsageError("the model's files have no head (lm_head.weight): it generates no text")


def default_spec(model: Any) -> str:
    """Return the default speculative mode of `model`: that of its draft, wedlm with a mask token, else off."""
    if isinstance(model, Pair):
        return model.spec
    return "off" if getattr(model.config, "mask_id", None) is None else "wedlm"


def default_window(model: Any, greedy: bool = True) -> WedlmOptions:
    """Return the window of `model` where a call chooses none: as it was loaded with, as calibrated, or `balanced`.

    greedy  whether the most probable token is taken; only then may the window confirm its masks
    """
    window: WedlmOptions = getattr(model, "window", PRESETS["balanced"])
    return window if greedy else replace(window, sure=math.inf, verify=False)


def speculation_of(options: GenerationOptions, default: str, window: WedlmOptions = PRESETS["balanced"]) -> Speculation:
    """Return the speculative mode that `options` choose; raises UsageError for options of other modes.

    default  the mode of the model, by `default_spec`
    window   its window, by `default_window`
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
        "wedlm_verify": bool(options.wedlm_verify),
        "wedlm_order": options.wedlm_order is not None,
        "wedlm_sure": options.wedlm_sure is not None,
    }
    check_taken(kind, (name for name, asked in given.items() if asked))
    return Speculation(kind, options.tree_budget, options.tree_topk, options.chain_seed, _window_of(options, window))


def _window_of(options: GenerationOptions, default: WedlmOptions) -> WedlmOptions:
    """Build the options of a window: those that are given, the others from the named preset, else from `default`."""
    own: dict[str, Any] = {
        "window": options.wedlm_window,
        "tau": options.wedlm_tau,
        "penalty": options.wedlm_lambda,
        "order": options.wedlm_order,
        "sure": options.wedlm_sure,
        "verify": options.wedlm_verify,
    }
    base = default if options.wedlm_preset is None else PRESETS[options.wedlm_preset]
    return replace(base, **{k: v for k, v in own.items() if v is not None})
