"""Granite 3 (`granite`, `granitemoe`): Llama with factors on embedding, on what each half of a layer adds, on scores
and on logits. In mixtures every layer has experts, chosen by a softmax, in place of the FFN.

A layer adds r times the output of its halves to x. We keep x / r instead: the same network adds these outputs as they
are, its norms divide x / r by the root of its mean square plus eps / r², and the embedding is multiplied by its own
factor over r.
"""

from dataclasses import dataclass, replace

from common.checkpoint import Checkpoint
from common.config import Keys
from common.models import llama
from common.models.blocks import Experts
from common.models.llama import for_rank as for_rank
from common.models.llama import forward as forward
from common.models.llama import state_spec as state_spec
from common.shards import ONE, Ranks, by_columns, by_expert_rows
from common.weights import ExpertMatrix, Layout, Matrix, Names, Table


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's configuration, whose `eps` is that of norms of x / r, and the factors."""

    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    logit_scale: float = 1.0
    hidden_scale: float = 1.0  # r, by which hidden states are multiplied for drafts


def read_config(checkpoint: Checkpoint) -> Config:
    c = llama.read_config(checkpoint)
    if checkpoint.format == "gguf":
        keys = Keys(checkpoint.config, str(checkpoint.path), prefix=c.architecture + ".", nested=False)
        keys.expect("rope.scaling.finetuned", True)  # False: there is no rope
        names = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
        attention = keys.positive(names[-1], c.head_dim**-0.5)
    else:
        keys = Keys(checkpoint.config, f"{checkpoint.path} config.json")
        names = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
        attention = keys.positive(names[-1], 1.0)
        if c.architecture == "granitemoe":
            experts = Experts(keys.size("num_local_experts"), keys.size("num_experts_per_tok"), c.ffn)
            c = replace(c, ffn=0, experts=experts)
    embedding, residual, logits = (keys.positive(name, 1.0) for name in names[:-1])
    c = replace(c, eps=c.eps / residual**2)
    return Config(
        **vars(c),
        embedding_scale=embedding / residual,
        attention_scale=attention,
        logit_scale=1 / logits,
        hidden_scale=residual,
    )


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    return llama.layout(c, checkpoint, _moe_weights)


def _moe_weights(tensor: Names, hidden: int, e: Experts, ranks: Ranks = ONE) -> Table:
    """List a router and its experts, whose gate and up are one tensor, but two in mlx-lm's folders and GGUF files."""
    name, channels, shape = "block_sparse_moe.", ranks.segment(e.ffn), (e.count, e.ffn, hidden)
    if is_trained := tensor.has(name + "input_linear.weight"):
        both = by_expert_rows(channels, channels)
        gate_up = [tensor(name + "input_linear.weight", "", (e.count, 2 * e.ffn, hidden), shard=both)]
    else:
        parts = {f"{name}switch_mlp.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up")}
        gate_up = [tensor(hf, gguf, shape, shard=by_expert_rows(channels)) for hf, gguf in parts.items()]
    down = name + ("output_linear.weight" if is_trained else "switch_mlp.down_proj.weight")
    return {
        "router": Matrix(tensor(name + "router.layer.weight", "ffn_gate_inp.weight", (e.count, hidden))),
        "experts_gate_up": ExpertMatrix(*gate_up),
        "experts_down": ExpertMatrix(
            tensor(down, "ffn_down_exps.weight", (e.count, hidden, e.ffn), shard=by_columns(channels))
        ),
    }
