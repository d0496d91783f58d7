"""Granite's factors, which are applied elsewhere than transformers does, to what is seen beside logits."""

from dataclasses import replace

import numpy as np
import tiny

from common.embeddings import empty_state, hidden_states
from common.models import granite
from common.models.blocks import swiglu_ffn
from common.models.llama import attention
from common.models.taps import tapped
from common.step import Step
from generate.synthetic import synthetic_checkpoint

IDS = tiny.golden("granite")["ids"][:32].astype(np.int32)


def test_released_factors():
    """Granite 3.3 8B: every factor is where the file states it, or over the residual multiplier."""
    c = granite.read_config(synthetic_checkpoint("granite-3.3-8b:q4_k_m"))
    assert (c.attention_scale, c.logit_scale, c.hidden_scale) == (1 / 128, 1 / 16, 0.22)
    assert (c.embedding_scale, c.eps) == (12 / 0.22, 1e-5 / 0.22**2)


def hidden_as_trained(model, factors):
    """The output of each layer, (T, hidden), with every factor where transformers applies it."""
    ops, c, w, step = model.ops, model.config, model.weights, Step.chain(IDS, 0)
    c, state = replace(c, eps=factors["rms_norm_eps"]), model.new_state(tiny.CAPACITY)
    x, outputs = ops.scale(ops.embed(w.embed, IDS), factors["embedding_multiplier"]), []
    for layer, kv in zip(w.layers, state.layers, strict=True):
        y = attention(ops, c, layer, kv.kv, step, ops.rms_norm(x, layer.attn_norm, c.eps))
        x = ops.add(x, ops.scale(y, factors["residual_multiplier"]))
        y = swiglu_ffn(ops, layer, ops.rms_norm(x, layer.ffn_norm, c.eps))
        x = ops.add(x, ops.scale(y, factors["residual_multiplier"]))
        outputs.append(ops.read(x))
    return outputs


def test_drafts_read_hidden_states_as_trained(ops):
    model = tiny.load("granite", ops)
    expected = hidden_as_trained(model, tiny.checkpoint("granite").config)
    step, state = Step.chain(IDS, 0), model.new_state(tiny.CAPACITY)
    _, outputs = tapped(model, [0, 2], state, step, slice(None), range(3))
    for layer in (0, 2):
        np.testing.assert_allclose(ops.read(outputs[layer]), expected[layer], atol=1e-5)


def test_embeddings_have_no_factor_of_logits(ops):
    """The hidden states after the last norm are those of any factor."""
    model = tiny.load("granite", ops)
    other = replace(model, config=replace(model.config, logit_scale=3.0))
    of_model, of_other = (
        np.concatenate(list(hidden_states(each, empty_state(each, len(IDS)), IDS))) for each in (model, other)
    )
    assert np.array_equal(of_model, of_other)
