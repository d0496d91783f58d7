"""Synthetic models cut down to a few layers of the widths that kernels have short forms for."""

from typing import Any

from generate.synthetic import METADATA

WIDE: dict[str, dict[str, Any]] = {
    "wedlm-8b": {"attention.head_count": 8, "attention.head_count_kv": 2},
    "qwen2.5-7b": {"attention.head_count": 8, "attention.head_count_kv": 2},
    "qwen3-30b-a3b": {
        **{"attention.head_count": 16, "attention.head_count_kv": 2, "expert_count": 16},
        **{"expert_used_count": 4, "expert_feed_forward_length": 256},
    },
    "laguna-xs.2": {
        **{"attention.head_count": [8, 16, 16, 16], "attention.head_count_kv": 2, "expert_count": 16},
        **{"expert_used_count": 4, "expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 256},
        **{"attention.sliding_window": 32},
    },
    "gpt-oss-20b": {  # whose widths are no multiples of 256
        **{"embedding_length": 576, "attention.head_count": 16, "attention.head_count_kv": 2, "expert_count": 16},
        **{"expert_used_count": 4, "expert_feed_forward_length": 320, "attention.sliding_window": 32},
    },
    "glm-4.7-flash": {
        **{"attention.head_count": 4, "attention.q_lora_rank": 256, "expert_count": 16},
        **{"expert_used_count": 4, "expert_feed_forward_length": 256},
    },
}


def narrow(name, monkeypatch):
    """Have `synthetic` make the model `name` no larger than WIDE says, until the test ends."""
    metadata = dict(METADATA[name])
    sizes = {"vocab_size": 512, "embedding_length": 512, "block_count": 4, "feed_forward_length": 512}
    metadata |= {f"{metadata['general.architecture']}.{key}": n for key, n in (sizes | WIDE[name]).items()}
    monkeypatch.setitem(METADATA, name, metadata)
