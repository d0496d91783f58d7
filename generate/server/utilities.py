"""Tokens and templates: /tokenizer_info, /tokenize, /detokenize, /apply-template, and counts of input tokens."""

from collections.abc import Callable
from typing import Any

from common.errors import PromptTooLongError
from common.rules import many, whole
from generate.llm import LLM
from generate.server import chat, messages, responses
from generate.server.conversation import Message, arrange, messages_of, tools_of
from generate.server.errors import ApiError
from generate.server.facts import Facts
from generate.server.fields import TEXT, Fields
from generate.server.store import Store
from generate.server.task import Task, rendered
from generate.server.thinking import template_options
from generate.server.wire import token_text

MOST_TEXT = 4 << 20  # characters of a text to tokenize: other requests' prompts wait for their turn meanwhile
Utility = Callable[[Fields, Facts, LLM], dict[str, Any]]


def tokenizer_info(facts: Facts) -> dict[str, Any]:
    """Describe the tokenizer as vLLM does, so that evaluation harnesses use the server's."""
    tokenizer = facts.tokenizer
    more = {"add_bos_token": tokenizer.add_bos, "chat_template": facts.template or None}
    return {"tokenizer_class": type(tokenizer).__name__, **facts.control_texts, "pad_token": None, **more}


def tokenize(fields: Fields, facts: Facts, llm: LLM) -> dict[str, Any]:
    """Return the token ids of a text (`content` as in llama.cpp, `prompt` as in vLLM) or of `messages`.

    Raises PromptTooLongError, before encoding, for messages that are certainly longer than the context.
    """
    if fields.has("messages"):
        arranged, options = _chat(fields, facts)
        ids = facts.tokenizer.chat_prompt(arranged, context=facts.context, **options).tokens
    else:
        key = "content" if fields.has("content") else "prompt"
        text = fields.need(key, TEXT)
        if len(text) > MOST_TEXT:
            most = f"at most {MOST_TEXT} are supported"
            raise ApiError(413, f"{key} has {len(text)} characters; {most}", param=key)
        special = fields.flag("add_special", not fields.has("content"))
        special = fields.flag("add_special_tokens", special)
        ids = facts.tokenizer.encode(text, special, fields.flag("parse_special", True))
    body: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": facts.context}
    pieces, strings = fields.flag("with_pieces", False), fields.flag("return_token_strs", False)
    texts = {id: token_text(facts.tokenizer, id) for id in set(ids)} if pieces or strings else {}
    if pieces:
        shown = {id: {"id": id, "piece": piece(*text)} for id, text in texts.items()}
        body["tokens"] = [shown[id] for id in ids]
    if strings:
        body["token_strs"] = [texts[id][0] for id in ids]
    return body


def piece(text: str, data: bytes) -> str | list[int]:
    """Return a token as llama.cpp shows it: its text, or its bytes if these are not UTF-8 by themselves."""
    return text if text.encode() == data else list(data)


def detokenize(fields: Fields, facts: Facts, llm: LLM) -> dict[str, Any]:
    """Return the text of `tokens`, under llama.cpp's name and vLLM's."""
    ids = many("a list of token ids", whole(0, facts.tokenizer.vocab_size - 1))
    text = facts.tokenizer.decode(fields.need("tokens", ids))
    return {"content": text, "prompt": text}


def apply_template(fields: Fields, facts: Facts, llm: LLM) -> dict[str, Any]:
    """Return the text that the chat template writes for `messages`."""
    arranged, options = _chat(fields, facts)
    return {"prompt": llm.render(arranged, **options)}


def _chat(fields: Fields, facts: Facts) -> tuple[list[Message], dict[str, Any]]:
    """Return the `messages` of a request, and the options by which they are rendered."""
    options = template_options(fields.object("chat_template_kwargs"), facts)
    options |= options.pop("template", {})
    if tools := tools_of(fields):
        options["tools"] = tools
    options["add_generation_prompt"] = fields.flag("add_generation_prompt", True)
    return arrange(messages_of(fields), facts), options


def count_chat(fields: Fields, facts: Facts, llm: LLM) -> dict[str, Any]:
    """Count the input tokens of a request of Chat Completions."""
    return _count(chat.parse(fields, facts).task, llm)


def count_response(store: Store, fields: Fields, facts: Facts, llm: LLM) -> dict[str, Any]:
    """Count the input tokens of a request of Responses, with those of the conversation that it continues."""
    return {"object": "response.input_tokens"} | _count(responses.parse(store, fields, facts).task, llm)


def count_messages(fields: Fields, facts: Facts, llm: LLM) -> dict[str, Any]:
    """Count the input tokens of a request of Messages, which needs no max_tokens here."""
    return _count(messages.task_of(fields, facts)[0], llm)


def _count(task: Task, llm: LLM) -> dict[str, Any]:
    try:
        return {"input_tokens": len(rendered(llm, task)[0].tokens)}
    except PromptTooLongError as error:
        return {"input_tokens": error.tokens}
