"""Granite 3 (`granite`): Llama with factors on the embedding, on what each half of a layer adds, on scores and logits.

A layer adds r times the output of its halves to x. We keep x / r instead: the same network adds these outputs as they
are, its norms divide x / r by the root of its mean square plus eps / r², and the embedding is multiplied by its own
factor over r.
"""

from dataclasses import dataclass, replace

from common.checkpoint import Checkpoint
from common.config import Keys
from common.models import llama
from common.models.llama import for_rank as for_rank
from common.models.llama import forward as forward
from common.models.llama import layout as layout
from common.models.llama import state_spec as state_spec


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
    embedding, residual, logits = (keys.positive(name, 1.0) for name in names[:-1])
    c = replace(c, eps=c.eps / residual**2)
    return Config(
        **vars(c),
        embedding_scale=embedding / residual,
        attention_scale=attention,
        logit_scale=1 / logits,
        hidden_scale=residual,
    )
