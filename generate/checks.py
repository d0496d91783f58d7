"""Options of a reply, checked before a model is loaded."""

from collections.abc import Mapping
from typing import Any

from common.decode.speculative import Speculation
from common.sampling import Sampling


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for a value that no model takes."""
    Sampling(**{name: options[name] for name in Sampling.__dataclass_fields__ if name in options})
    names = {"spec": "kind", "tree_budget": "budget", "tree_topk": "top_k", "chain_seed": "seed_chain"}
    Speculation(**{names[name]: options[name] for name in names if name in options})
