"""Functions that take options as keyword arguments, so that `help` and completion list each with type and default."""

import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Concatenate, ParamSpec, TypeVar

from common.options import ChatOptions, GenerationOptions, LoadOptions, Options, Sampling

P = ParamSpec("P")
Self = TypeVar("Self")
Subject = TypeVar("Subject")
Made = TypeVar("Made")
Result = TypeVar("Result")

OTHER_NAMES = {  # of other programs, and earlier ones of our own
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temp": "temperature",
    "top_logprobs": "logprobs",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "enable_thinking": "think",
    "chat_template_kwargs": "template",
    "fa_window": "attention_window",
    "n_ctx": "ctx",
    "num_ctx": "ctx",
    "context": "ctx",
    "context_length": "ctx",
    "max_model_len": "ctx",
    "response_format": "guide",
    "structured_outputs": "guide",
    "json_schema": "guide",
    "schema": "guide",
    "regex": "guide",
    "grammar": "guide",
    "draft_model": "draft",
    "tensor_split": "split",
    "device": "devices",
}


REPLACEMENTS = {  # what to use in place of arguments that are no option of any call
    "stream": "stream(prompt) and stream_chat(messages) give a reply in pieces",
    "n": "a list that has the prompt n times gives n replies",
    "system": 'chat takes {"role": "system", "content": ...} as the first message',
    "sampling_params": "its fields are options of their own",
    "tool_choice": "the server alone takes it",
}
RECOMMENDED = (
    "An option that is not given, or None, is as the model's files recommend (`recommended_options`), else its default."
)


def takes_options(
    options: Callable[P, Made],
) -> Callable[[Callable[[Self, Subject, Made], Result]], Callable[Concatenate[Self, Subject, P], Result]]:
    """Decorate a method whose last parameter is an `options` object to take the options as keyword arguments."""
    return functools.partial(with_keywords, options)  # type: ignore[arg-type]


def with_keywords(options: type[Options], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the fields of `options` as keyword arguments in place of its last parameter.

    An unknown name is a TypeError that names the nearest option. An option that is not given, or None, takes the value
    in `recommended_options` of the method's object, if the object has that attribute.
    """
    own = inspect.signature(function)
    leading = list(own.parameters.values())[:-1]
    named = [parameter.name for parameter in leading if parameter.name != "self"]
    signature = own.replace(parameters=[*leading, *inspect.signature(options).parameters.values()])

    def arguments(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
        unknown = next((name for name in given if name not in signature.parameters), None)
        if unknown is not None:
            raise TypeError(f"{function.__name__}() has no option {unknown}; {_hint(unknown, options, named)}")
        if len(args) > len(leading):
            raise TypeError(f"{function.__name__}() takes {', '.join(named)} by position; options are given by name")
        bound = signature.bind(*args, **given).arguments
        first = [bound.pop(parameter.name, parameter.default) for parameter in leading]
        chosen = {name: value for name, value in bound.items() if value is not None}
        return (*first, options(**{**getattr(first[0], "recommended_options", {}), **chosen}))

    wrapper: Any
    if inspect.iscoroutinefunction(function):

        async def wrapper(*args: Any, **given: Any) -> Any:
            return await function(*arguments(args, given))

    else:

        def wrapper(*args: Any, **given: Any) -> Any:
            return function(*arguments(args, given))

    functools.update_wrapper(wrapper, function)
    wrapper.__signature__ = signature
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    recommended = f"\n\n{RECOMMENDED}" if issubclass(options, Sampling) else ""
    wrapper.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}{recommended}\n\n{describe(options)}"
    made: Callable[..., Any] = wrapper
    return made


def describe(options: type[Options]) -> str:
    """Describe the options, a paragraph each, for a docstring."""
    width = max(len(f.name) for f in fields(options)) + 2
    return "\n".join(
        textwrap.fill(f"{f.name:{width}}{f.metadata['meaning']}", 110, subsequent_indent=" " * width)
        for f in fields(options)
    )


def _hint(unknown: str, options: type[Options], named: Sequence[str]) -> str:
    """Name the option that `unknown` may mean, or all options.

    named  the function's parameters beside the options
    """
    if unknown in REPLACEMENTS:
        return REPLACEMENTS[unknown]
    places: dict[str, str] = {}
    for kind, place in ((LoadOptions, "load"), (ChatOptions, "chat"), (GenerationOptions, "generate")):
        places |= {f.name: place for f in fields(kind)}
    own = [f.name for f in fields(options)]
    lists = [*own, *named], list(places), list(OTHER_NAMES)
    near = next((close[0] for names in lists if (close := get_close_matches(unknown, names, 1, 0.7))), None)
    found = OTHER_NAMES.get(unknown) or (OTHER_NAMES.get(near, near) if near else None)
    if found is None:
        return f"its options are {', '.join(own)}"
    return f"did you mean {found}?" if found in (*own, *named) else f"{found} is an option of {places[found]}"
