"""Reasoning: which of a chat template's variables a request sets."""

from typing import Any

from common.harmony import EFFORTS as OTHER_EFFORTS
from common.options import RESERVED
from common.tools import is_harmony
from generate.server.errors import ApiError
from generate.server.facts import EFFORT, Facts
from generate.server.fields import Fields

OWN = {"enable_thinking", "documents", "add_generation_prompt", "bos_token", "eos_token", *RESERVED}
KINDS = ("enabled", "disabled", "adaptive")  # of the `thinking` of a request
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def effort_options(effort: str | None, facts: Facts) -> dict[str, Any]:
    """Return the rendering options of an effort, if the template has any; an unknown effort is "medium"."""
    if effort is None:
        return {}
    found: dict[str, Any] = {}
    if facts.switches_thinking:
        found["think"] = effort != "none"
    if EFFORT in facts.template:
        known = effort if effort in EFFORTS else "medium"
        found["template"] = {EFFORT: OTHER_EFFORTS.get(known, known) if is_harmony(facts.template) else known}
    return found


def switch_options(on: bool | None, facts: Facts) -> dict[str, Any]:
    """Return the options of rendering that turn thinking on or off, where the template can."""
    return {} if on is None or not facts.switches_thinking else {"think": on}


def options_of_begun(rendering: dict[str, Any], facts: Facts, constrained: bool, key: str) -> dict[str, Any]:
    """Return the options of rendering for a reply that goes on from text: without reasoning.

    Refuses reasoning that is requested, and, if `constrained`, a form or a call: a grammar holds from a reply's start.

    key  the request's field that holds the text, for the error
    """
    if rendering.get("think") or constrained:
        what = "has a required form or call" if constrained else "reasons first"
        raise ApiError(
            400, f"{key} ends with a message of the assistant; a reply that {what} cannot continue it", param=key
        )
    return rendering | switch_options(False, facts)


def thinking_options(fields: Fields, facts: Facts) -> dict[str, Any]:
    """Return the options of rendering for `thinking` and `enable_thinking`, which clients add to Chat Completions."""
    thinking = fields.object("thinking") or Fields({})
    kind = thinking.choice("type", *KINDS)
    found = switch_options(None if kind is None else kind != "disabled", facts)
    return found | switch_options(fields.flag("enable_thinking"), facts)


def template_options(fields: Fields | None, facts: Facts) -> dict[str, Any]:
    """Return the options of rendering for `chat_template_kwargs`: those that the template reads."""
    if fields is None:
        return {}
    found = switch_options(fields.flag("enable_thinking"), facts)
    read = {k: v for k, v in fields.values.items() if k.isidentifier() and k in facts.template and k not in OWN}
    return found | ({"template": read} if read else {})
