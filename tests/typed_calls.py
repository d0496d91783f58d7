"""State the types that an editor shows of calls, for mypy, which checks this file; nothing runs it."""

from typing import assert_type

import numpy as np

import generate
from common.pieces import Piece
from generate import LLM, Gap, Reply, Stream


async def calls(messages: list[dict[str, str]]) -> None:
    with generate.load("demo", ctx=1024, kv="q8") as llm:
        assert_type(llm, LLM)
        assert_type(llm.generate("x", max_tokens=4), Reply)
        assert_type(llm.generate([1, 2]), Reply)
        assert_type(llm.generate(np.array([1, 2]), suffix="y"), Reply)
        assert_type(llm.generate(Gap("x", "y")), Reply)
        assert_type(llm.generate(["x", [1, 2], Gap("x")], temperature=0), list[Reply])
        assert_type(llm.chat(messages, think=True), Reply)
        assert_type(llm.chat([messages, [{"role": "user", "content": "x"}]]), list[Reply])
        assert_type(llm.stream("x"), Stream)
        assert_type(await llm.agenerate("x"), Reply)
        assert_type(await llm.achat(messages), Reply)
        async for piece in llm.astream_chat(messages):
            assert_type(piece, Piece)
        llm.generate("x", max_new_tokens=4)  # type: ignore[call-overload]
        llm.generate("x", temperature="hot")  # type: ignore[call-overload]
        llm.chat(messages, suffix="y")  # type: ignore[call-overload]
