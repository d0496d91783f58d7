"""GLM-4.5 beyond the goldens of test_golden.py: the released shapes, and what its sizes differ in."""

import json

import numpy as np
import pytest
import tiny
from folders import assert_layout, rewritten, shapes_only
from gguf_files import write_gguf
from test_golden import KL, LOGIT
from test_laguna import ROUTER_TRAPS
from test_traps import errors_of, fresh, passes

from common.checkpoint import open_checkpoint
from common.models import glm4_moe, load_model
from common.reference import NumpyOps
from common.storage import state_bytes

FOLDER = tiny.FOLDER / "glm4moe"


def released():
    """The keys and the shapes of GLM-4.5-Air's GGUF files, whose last block predicts a further token."""
    keys = {
        **{"block_count": 47, "nextn_predict_layers": 1, "context_length": 131072, "embedding_length": 4096},
        **{"feed_forward_length": 10944, "attention.head_count": 96, "attention.head_count_kv": 8},
        **{"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 64},
        **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6, "leading_dense_block_count": 1},
        **{"expert_count": 128, "expert_used_count": 8, "expert_shared_count": 1, "expert_gating_func": 2},
        **{"expert_feed_forward_length": 1408, "expert_weights_scale": 1.0, "expert_weights_norm": True},
    }
    shapes = {"token_embd.weight": (151552, 4096), "output.weight": (151552, 4096), "output_norm.weight": (4096,)}
    for i in range(47):
        block = {
            **{"attn_norm": (4096,), "post_attention_norm": (4096,), "attn_output": (4096, 12288)},
            **{"attn_q": (12288, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096)},
        }
        shapes |= {f"blk.{i}.attn_{part}.bias": (12288 if part == "q" else 1024,) for part in "qkv"}
        if i == 0:
            block |= {"ffn_gate": (10944, 4096), "ffn_up": (10944, 4096), "ffn_down": (4096, 10944)}
        else:
            shapes[f"blk.{i}.exp_probs_b.bias"] = (128,)
            block |= {"ffn_gate_inp": (128, 4096), "ffn_gate_exps": (128, 1408, 4096), "ffn_up_exps": (128, 1408, 4096)}
            block |= {"ffn_down_exps": (128, 4096, 1408), "ffn_gate_shexp": (1408, 4096)}
            block |= {"ffn_up_shexp": (1408, 4096), "ffn_down_shexp": (4096, 1408)}
        if i == 46:
            block |= {"nextn.eh_proj": (4096, 8192), "nextn.embed_tokens": (151552, 4096), "nextn.enorm": (4096,)}
            block |= {"nextn.hnorm": (4096,), "nextn.shared_head_norm": (4096,)}
            block |= {"nextn.shared_head_head": (151552, 4096)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return keys, shapes


def test_released_gguf():
    keys, shapes = released()
    checkpoint = shapes_only("glm4moe", keys, shapes)
    c = glm4_moe.read_config(checkpoint)
    assert (c.layers, c.has_biases, c.norms_heads, 2 * len(c.rope.frequencies)) == (46, True, False, 64)
    assert state_bytes(glm4_moe.state_spec(c), 1, 2) == 46 * 2 * 8 * 128 * 2
    layout = glm4_moe.layout(c, checkpoint)
    own = {name: shape for name, shape in shapes.items() if not name.startswith("blk.46.")}
    assert_layout(layout, own)
    assert all(layout.ignored(name) for name in shapes if name not in own)
    assert not layout.ignored("blk.4.attn_q.weight")


def without_norms(tensors):
    return {name: array for name, array in tensors.items() if "q_norm" not in name and "k_norm" not in name}


def test_without_norms_of_heads(ops, tmp_path):
    """GLM-4.5-Air: a folder and its GGUF file give the same logits, which are not those with norms."""
    folder = rewritten(FOLDER, tmp_path / "m", without_norms, use_qk_norm=False)
    path, ids = write_gguf(folder, tmp_path / "m.gguf"), tiny.golden("glm4moe")["ids"][:64]
    of_folder, of_gguf = (tiny.logits_of(load_model(each, ops), ids) for each in (folder, path))
    assert not open_checkpoint(path).tensors.keys() & {"blk.0.attn_q_norm.weight"}
    errors = tiny.errors(of_gguf, of_folder)
    assert errors.logit < LOGIT["glm4moe"]
    assert errors.kl < KL
    assert tiny.golden_errors(of_folder, "glm4moe").logit > 0.1


def test_released_keys(ops, tmp_path):
    """As GLM-4.5's config.json states them; transformers 5 writes others."""
    config = json.loads((FOLDER / "config.json").read_text())
    del config["rope_parameters"]
    old = {"rope_parameters": None, "rope_theta": 10000, "rope_scaling": None, "partial_rotary_factor": 0.5}
    folder = rewritten(FOLDER, tmp_path / "m", **(config | old | {"num_nextn_predict_layers": 1}))
    errors = tiny.golden_errors(tiny.logits_of(load_model(folder, ops), tiny.golden("glm4moe")["ids"]), "glm4moe")
    assert passes(errors, "glm4moe"), errors


def test_without_biases(tmp_path):
    """`attention_bias` false: the network of zero biases."""
    ids, ops = tiny.golden("glm4moe")["ids"][:64], NumpyOps()
    zero = rewritten(FOLDER, tmp_path / "zero", lambda t: {n: 0 * a if "proj.bias" in n else a for n, a in t.items()})
    none = rewritten(
        FOLDER, tmp_path / "none", lambda t: {n: a for n, a in t.items() if "proj.bias" not in n}, attention_bias=False
    )
    assert np.array_equal(*(tiny.logits_of(load_model(folder, ops), ids) for folder in (zero, none)))


@pytest.mark.parametrize("plant", [t[1] for t in ROUTER_TRAPS], ids=[t[0] for t in ROUTER_TRAPS])
@pytest.mark.few(3)
def test_mistake_in_the_router_is_seen(plant, monkeypatch):
    assert not passes(errors_of(plant(fresh("glm4moe"), monkeypatch), "glm4moe"), "glm4moe")
