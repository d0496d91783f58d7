"""What tests of draft files share: GGUF headers, states along a text, refusals by headers alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from test_ops_only import OPEN

from common.errors import BimetalError
from common.models.drafts import check_file, load_pair
from common.models.pair import Pair
from common.step import State, Step

LOGIT = (
    1e-3  # of logits up to 10, between two float32 ways (tests/test_state.py); a wrong mask or layer moves them by 0.1
)


def assert_refused(path: Path, target: str, words: str) -> None:
    """A draft is refused by headers alone, and by whoever loads the pair."""
    with pytest.raises(BimetalError, match=words):
        check_file(path, tiny.checkpoint(target))
    with pytest.raises(BimetalError, match=words):
        load_pair(path, tiny.load(target, OPEN))


def read_text(pair: Pair, state: State, text: np.ndarray, end: int) -> None:
    """Commit `text` up to `end`, in two steps."""
    for at in (max(state.length, end - 3), end):
        if at > state.length:
            pair.forward(state, Step.chain(text[state.length : at], state.length), slice(-1, None))
            state.commit(range(at - state.length))


def states(pair: Pair, text: np.ndarray, anchors: Sequence[int]) -> Iterator[tuple[State, int]]:
    """A state at each of the anchors, and the token of `text` there."""
    state = pair.new_state(64)
    for anchor in anchors:
        read_text(pair, state, text, anchor)
        yield state, int(text[anchor])


def assert_drafts_leave_no_trace(pair: Pair, text: np.ndarray) -> None:
    """A draft changes no state, and a path of a tree leaves the state that a chain leaves."""
    state, alone = pair.new_state(64), pair.new_state(64)
    for each in (state, alone):
        read_text(pair, each, text, 12)
    first = pair.drafted(state, 5, 2, 4)
    assert all(np.array_equal(a, b) for a, b in zip(first, pair.drafted(state, 5, 2, 4), strict=True))
    pair.forward(state, Step.tree(np.array([text[12], 3, text[13], text[14], 4]), [-1, 0, 0, 2, 2], 12))
    state.commit([0, 2, 3])
    read_text(pair, alone, text, 15)
    for a, b in zip(tiny.arrays_of(pair, state).items(), tiny.arrays_of(pair, alone).items(), strict=True):
        assert np.abs(a[1] - b[1]).max() < 1e-4, a[0]
    one, other = (pair.drafted(each, 5, 2, 3) for each in (state, alone))
    assert np.array_equal(one[0], other[0])
    assert np.abs(one[1] - other[1]).max() < LOGIT


def gguf_writer(path: Path, architecture: str, c: Mapping[str, Any]) -> gguf.GGUFWriter:
    """A GGUF file of a draft that has, so far, the sizes in `c`, the content of its config.json."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.get("num_hidden_layers", 1))
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    return writer


LAYER_NAMES = {
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, matrices: str = "F32") -> None:
    """Add a tensor, in the type `matrices` where it is a matrix of whole blocks."""
    kind = gguf.GGMLQuantizationType[matrices if values.ndim == 2 and values.shape[1] % 32 == 0 else "F32"]
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
