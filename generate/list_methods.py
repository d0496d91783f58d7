"""Give `generate` and `chat` their types: one reply to one prompt, a list of replies to a list of prompts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import numpy as np

from common.infill import Gap
from common.keywords import with_keywords
from generate.streams import Reply

P = ParamSpec("P")
Made = TypeVar("Made")
Prompt = str | Sequence[int] | np.ndarray
Message = Mapping[str, Any]


class _Generate(Protocol[P]):
    @overload
    def __call__(self, prompt: Prompt | Gap, *args: P.args, **options: P.kwargs) -> Reply: ...  # type: ignore[overload-overlap]  # text is a sequence of texts
    @overload
    def __call__(self, prompt: Sequence[Prompt | Gap], *args: P.args, **options: P.kwargs) -> list[Reply]: ...


class _Chat(Protocol[P]):
    @overload
    def __call__(self, messages: Sequence[Message], *args: P.args, **options: P.kwargs) -> Reply: ...
    @overload
    def __call__(self, messages: Sequence[Sequence[Message]], *args: P.args, **options: P.kwargs) -> list[Reply]: ...


class _GenerateMethod(Protocol[P]):
    def __get__(self, llm: Any, owner: Any = None) -> _Generate[P]: ...


class _ChatMethod(Protocol[P]):
    def __get__(self, llm: Any, owner: Any = None) -> _Chat[P]: ...


def generates(options: Callable[P, Made]) -> Callable[[Callable[..., Any]], _GenerateMethod[P]]:
    """Decorate `generate` as `takes_options` does."""
    return functools.partial(with_keywords, options)  # type: ignore[arg-type]


def chats(options: Callable[P, Made]) -> Callable[[Callable[..., Any]], _ChatMethod[P]]:
    """Decorate `chat` as `takes_options` does."""
    return functools.partial(with_keywords, options)  # type: ignore[arg-type]
