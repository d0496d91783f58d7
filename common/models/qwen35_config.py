"""Configuration of Qwen3-Next, Qwen3.5 and Qwen3.6, from config.json or GGUF metadata, and the share of one rank."""

from dataclasses import dataclass, replace

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models.blocks import Experts, check_sizes, gguf_rope, head_shares, hf_rope
from common.ops import Rope
from common.shards import ONE, Ranks


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    is_attention: tuple[bool, ...]  # per layer; the others are Gated DeltaNet
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    key_heads: int  # of Gated DeltaNet: Hk, Hv, Dk, Dv
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    ffn: int  # channels of dense models; 0 if experts replace the dense network
    experts: Experts | None
    eps: float
    context: int
    tied: bool
    grouped: bool  # of Gated DeltaNet: value head h uses key head h // (Hv / Hk), as Qwen3-Next stores it; else h % Hk
    ranks: Ranks = ONE  # ranks that share heads and channels; the numbers above are this rank's share
    kv_ranks: Ranks = ONE  # ranks that hold different KV heads


def read_config(checkpoint: Checkpoint) -> Config:
    c = _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)
    if c.value_heads % c.key_heads:
        raise BimetalError(f"{checkpoint.path}: {c.key_heads} key heads do not divide {c.value_heads} value heads")
    return c


def for_rank(c: Config, ranks: Ranks) -> Config:
    """Return the configuration of one rank: its heads (for Gated DeltaNet, key heads and theirs) and its channels."""
    key_heads = ranks.divide(c.key_heads, "key heads of Gated DeltaNet")
    return replace(
        c,
        **head_shares(c, ranks),
        key_heads=key_heads,
        value_heads=c.value_heads // ranks.size,
        ffn=ranks.divide(c.ffn, "channels of the feed-forward network"),
        experts=c.experts and c.experts.for_rank(ranks),
    )


def _hf_config(checkpoint: Checkpoint) -> Config:
    where = f"{checkpoint.path} config.json"
    values = checkpoint.config.get("text_config") or checkpoint.config
    keys = Keys(values, where)
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("attn_output_gate", True)
    is_next = keys.get("model_type") == "qwen3_next"
    if is_next:
        keys.expect("decoder_sparse_step", 1)
        keys.expect("mlp_only_layers", [])
        keys.expect("norm_topk_prob", True)
    head_dim, layers = keys.size("head_dim", 256), keys.size("num_hidden_layers")
    kinds = keys.read("layer_types", list, [])
    if kinds and (len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}):
        raise BimetalError(f"{where}: layer_types must name linear_attention or full_attention for {layers} layers")
    heads, kv_heads = keys.size("num_attention_heads"), keys.size("num_key_value_heads")
    key_heads, key_dim = keys.size("linear_num_key_heads"), keys.size("linear_key_head_dim")
    value_heads, value_dim = keys.size("linear_num_value_heads"), keys.size("linear_value_head_dim")
    experts = keys.size("num_experts") if is_next else keys.read("num_experts", int, 0)
    check_sizes(
        checkpoint, layers, heads, kv_heads, heads * head_dim, key_heads * key_dim, value_heads * value_dim, experts
    )
    interval = keys.size("full_attention_interval", 4)
    rotary = keys.positive("rope_parameters.partial_rotary_factor", keys.positive("partial_rotary_factor", 0.25))
    tied = keys.read("tie_word_embeddings", bool, bool(checkpoint.config.get("tie_word_embeddings", False)))
    return Config(
        vocab=keys.size("vocab_size"),
        hidden=keys.size("hidden_size"),
        is_attention=tuple(k == "full_attention" for k in kinds) or _every(interval, layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=hf_rope(keys, _rotary(where, head_dim * rotary, head_dim)),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=keys.size("linear_conv_kernel_dim", 4),
        ffn=0 if experts else keys.size("intermediate_size"),
        experts=Experts(
            keys.size("num_experts"),
            keys.size("num_experts_per_tok"),
            keys.size("moe_intermediate_size"),
            keys.size("shared_expert_intermediate_size"),
        )
        if experts
        else None,
        eps=keys.positive("rms_norm_eps", 1e-6),
        context=keys.size("max_position_embeddings"),
        tied=tied and not any(name.endswith("lm_head.weight") for name in checkpoint.tensors),
        grouped=is_next,
    )


def _gguf_config(checkpoint: Checkpoint) -> Config:
    architecture = checkpoint.config["general.architecture"]
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix=architecture + ".", nested=False)
    # block_count includes the multi-token-prediction blocks at the end, which plain decoding does not run
    layers = keys.size("block_count") - keys.read("nextn_predict_layers", int, 0)
    if layers < 1:
        raise BimetalError(f"{checkpoint.path}: {architecture}.nextn_predict_layers leaves {layers} layers")
    recurrent = keys.read("attention.recurrent_layers", list, [])[:layers]
    if recurrent and len(recurrent) < layers:
        raise BimetalError(
            f"{checkpoint.path}: {architecture}.attention.recurrent_layers lists {len(recurrent)} of {layers} layers"
        )
    kv_heads = keys.get("attention.head_count_kv")
    if isinstance(kv_heads, list) and all(isinstance(n, int) for n in kv_heads):  # 0 on Gated DeltaNet layers
        flat = checkpoint.config | {keys.prefix + "attention.head_count_kv": max(kv_heads, default=0)}
        keys = Keys(flat, keys.where, keys.prefix, nested=False)
    head_dim, heads, kv_heads = (keys.size(f"attention.{key}") for key in ("key_length", "head_count", "head_count_kv"))
    key_heads, key_dim = keys.size("ssm.group_count"), keys.size("ssm.state_size")
    value_heads, inner = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    check_sizes(checkpoint, layers, heads, kv_heads, heads * head_dim, key_heads * key_dim, value_heads, inner)
    keys.expect("attention.value_length", head_dim)
    keys.expect("expert_gating_func", 1)
    keys.expect("expert_weights_scale", 0.0, 1.0)
    is_moe = architecture in ("qwen3next", "qwen35moe")
    table = checkpoint.tensors.get("token_embd.weight")
    return Config(
        vocab=table.shape[0] if table and table.shape else keys.size("vocab_size"),
        hidden=keys.size("embedding_length"),
        is_attention=tuple(not r for r in recurrent) or _every(keys.size("full_attention_interval", 4), layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=gguf_rope(keys, _rotary(keys.where, keys.size("rope.dimension_count"), head_dim), None),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=inner // value_heads,
        taps=keys.size("ssm.conv_kernel"),
        ffn=0 if is_moe else keys.size("feed_forward_length"),
        experts=Experts(
            keys.size("expert_count"),
            keys.size("expert_used_count"),
            keys.size("expert_feed_forward_length"),
            keys.size("expert_shared_feed_forward_length"),
        )
        if is_moe
        else None,
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        context=keys.size("context_length"),
        tied="output.weight" not in checkpoint.tensors,
        grouped=architecture == "qwen3next",
    )


def _rotary(where: str, channels: float, head_dim: int) -> int:
    if channels > head_dim:
        raise BimetalError(f"{where}: rope turns {channels} channels of a head of {head_dim}")
    return int(channels)


def _every(interval: int, layers: int) -> tuple[bool, ...]:
    return tuple((i + 1) % interval == 0 for i in range(layers))
