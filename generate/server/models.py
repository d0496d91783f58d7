"""The list of models, with the entries of OpenAI, Anthropic, OpenRouter, vLLM and LM Studio."""

from datetime import UTC, datetime
from typing import Any

from generate.server.facts import Facts


def model_entry(facts: Facts) -> dict[str, Any]:
    """Return one model."""
    return {
        "id": facts.name,
        "object": "model",
        "type": "model",
        "name": facts.name,
        "display_name": facts.name,
        "created": facts.created,
        "created_at": datetime.fromtimestamp(facts.created, UTC).isoformat(),
        "owned_by": "bimetal",
        "context_length": facts.context,
        "max_model_len": facts.context,
        "max_context_length": facts.context,
        "max_input_tokens": facts.context,
        "max_tokens": facts.context,
        "meta": {
            "n_ctx": facts.context,
            "n_ctx_train": facts.trained_context,
            "n_vocab": facts.vocab,
            "n_params": facts.parameters,
            "size": facts.size,
        },
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "state": "loaded",
    }


def model_list(facts: Facts) -> dict[str, Any]:
    """Return all models, which is one, as OpenAI and Anthropic list them."""
    entry = model_entry(facts)
    ends = {"first_id": facts.name, "last_id": facts.name, "has_more": False}
    return {"object": "list", "data": [entry]} | ends
