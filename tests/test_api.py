"""`import generate`: the calls that notebooks and services make, on the NumPy backend."""

import asyncio
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import tomllib
import warnings
import weakref
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_chat import TEMPLATE, write
from tqdm import tqdm

import generate
from common.errors import BimetalError, PromptTooLongError, UsageError
from common.reference import NumpyOps
from common.sampling import log_softmax
from common.schedule import SHARED_PREFILL_ROWS
from common.sequence import Sequence
from generate import progress
from generate.owner_thread import Inbox, Outbox, OwnerThread

ROOT = Path(__file__).parents[1]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    with generate.load(folder, backend="numpy") as llm:
        yield llm


def test_generate_gives_text_tokens_reason_and_stats(llm):
    reply = llm.generate("hello", max_tokens=12)
    assert "".join(map(llm.tokenizer.decoder().push, reply.tokens)) == reply.text
    assert reply.finish_reason == "length"
    assert len(reply.tokens) == reply.stats.new_tokens == 12
    assert str(reply) == reply.text
    assert reply.stats.decode_tps > 0


def test_what_a_notebook_shows_of_objects(folder):
    """A stream and a tokenizer were shown by their addresses, and a closed model as an open one."""
    with generate.load(folder, backend="numpy") as llm:
        stream = llm.stream("hello", max_tokens=2)
        assert repr(stream) == "<Stream: 0 tokens read, not finished>"
        stream.reply()
        assert repr(stream) == "<Stream: 2 tokens read, length>"
        assert repr(llm.tokenizer) == f"<Tokenizer: {llm.tokenizer.vocab_size} tokens>"
        assert not repr(llm).endswith(", closed>")
    assert repr(llm).endswith(", closed>")


def test_text_and_its_ids_are_the_same_prompt(llm):
    assert (
        llm.generate("hello", max_tokens=8).tokens == llm.generate(llm.tokenizer.encode("hello"), max_tokens=8).tokens
    )


def test_stream_yields_the_reply_and_collects_it(llm):
    stream = llm.stream("hello", max_tokens=12, logprobs=2)
    pieces = list(stream)
    assert "".join(p.text for p in pieces) == stream.text == llm.generate("hello", max_tokens=12).text
    assert len(stream.logprobs) == len(stream.tokens) == 12
    assert stream.finish_reason == "length"
    assert list(stream) == []


def test_chat_renders_the_template(llm):
    assert llm.render(MESSAGES) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    reply = llm.chat(MESSAGES, max_tokens=6)
    assert reply.tokens == llm.generate(llm.tokenizer.encode(llm.render(MESSAGES)), max_tokens=6).tokens


def test_logits_are_float32_rows_over_the_vocabulary(llm):
    logits = llm.logits("hello")
    assert (logits.shape, logits.dtype) == ((5, 258), np.float32)
    assert logits[-1].argmax() == llm.generate("hello", max_tokens=1).tokens[0]


def test_the_bad_one_of_a_list_is_named(llm):
    with pytest.raises(PromptTooLongError, match=r"^prompt 1 of the list: the prompt has 999 tokens and") as caught:
        llm.generate(["a", "b" * 999, "c"])
    assert caught.value.tokens == 999
    with pytest.raises(BimetalError, match=r"^conversation 2 of the list: message 0 is {}, not an object with"):
        llm.chat([MESSAGES, MESSAGES, [{}]])


def test_questions_about_a_prompt_take_what_a_prompt_may_be(llm):
    llm.generate("held", max_tokens=1)
    assert llm.matched_tokens("held or not") == llm.matched_tokens(list(llm.tokenizer.encode("held"))) == len("held")
    with pytest.raises(UsageError, match="the prompt is None; it must be text or a sequence of token ids"):
        llm.matched_tokens(None)
    with pytest.raises(UsageError, match="queries is 0; it must be a whole number of at least 1"):
        llm.attention_to([1, 2, 3], 0)
    with pytest.raises(UsageError, match="top is -1; it must be a whole number of at least 0"):
        llm.score("hello", top=-1)


def test_logits_of_the_last_tokens_alone(llm):
    logits = llm.logits("hello")
    for last in (1, 3, 99):
        assert np.allclose(llm.logits("hello", last=last), logits[-last:], atol=1e-5)
    assert np.allclose(asyncio.run(llm.alogits("hello", last=1)), logits[-1:], atol=1e-5)
    with pytest.raises(UsageError, match="last is 0; it must be a whole number of at least 1"):
        llm.logits("hello", last=0)


def test_scores_are_those_of_the_logits(llm):
    ids = llm.tokenizer.encode("hello")
    scores = llm.score("hello", top=2)
    assert scores == asyncio.run(llm.ascore(ids, top=2))
    assert [each.token for each in scores] == ids[1:]
    expected = [log_softmax(row)[id] for row, id in zip(llm.logits(ids), ids[1:], strict=False)]
    assert np.allclose([each.logprob for each in scores], expected, atol=1e-6)


def test_a_stream_outlives_its_dropped_model(folder):
    pieces = list(generate.load(str(folder), backend="numpy").stream("hello", max_tokens=40))
    assert pieces[-1].finish_reason == "length"


def test_seed_repeats_and_temperature_varies(llm):
    one, two, other = (llm.generate("hello", max_tokens=20, temperature=1.5, seed=s).tokens for s in (1, 1, 2))
    assert one == two != other


THINKING = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
REFUSING = "{% if messages|length > 2 %}{{ raise_exception('no more') }}{% endif %}" + THINKING


@pytest.mark.parametrize(("template", "read_again"), [(TEMPLATE, 0), (THINKING, len("<think>\n")), (REFUSING, 0)])
def test_a_turn_goes_back_to_where_the_templates_next_one_will_part(template, read_again, tmp_path):
    """A template that leaves out the assistant's reasoning; tokens are bytes, except for special ones."""
    later = [*MESSAGES, {"role": "assistant", "content": "so"}, *MESSAGES]
    with generate.load(str(write(tmp_path, template=template)), backend="numpy") as llm:
        first = llm.chat(MESSAGES, max_tokens=6)
        if template is not REFUSING:
            reply = llm.chat(later, max_tokens=6)
            assert reply.stats.cached_tokens == first.stats.prompt_tokens - read_again
            llm.generate("else", max_tokens=1)
            assert llm.chat(later, max_tokens=6).tokens == reply.tokens
        llm.chat(MESSAGES, max_tokens=6)
        again = llm.chat(MESSAGES, max_tokens=6)
        assert again.tokens == first.tokens
        assert again.stats.cached_tokens == first.stats.prompt_tokens - read_again


def test_async_twins(llm):
    async def all_of_them():
        whole = await llm.agenerate("hello", max_tokens=9)
        stream = llm.astream("hello", max_tokens=9)
        text = "".join([piece.text async for piece in stream])
        chat = await llm.achat(MESSAGES, max_tokens=4)
        logits = await llm.alogits("hello")
        return whole, text, stream, chat, logits

    whole, text, stream, chat, logits = asyncio.run(all_of_them())
    assert whole.text == text == stream.text == llm.generate("hello", max_tokens=9).text
    assert chat.tokens == llm.chat(MESSAGES, max_tokens=4).tokens
    assert np.array_equal(logits, llm.logits("hello"))


def test_two_threads_neither_crash_nor_interleave(llm):
    prompts = [f"prompt {i}" for i in range(6)]
    expected = [llm.generate(p, max_tokens=25).tokens for p in prompts]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = llm.generate(prompts[i], max_tokens=25).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(len(prompts))] == expected


def test_replies_of_threads_are_generated_side_by_side(llm):
    """The second reply ends while the first, which began before it, goes on."""
    first = llm.stream("one", max_tokens=200)
    next(first)
    second = llm.generate("two", max_tokens=5)
    assert len(second.tokens) == 5
    assert first.finish_reason is None
    assert len(first.reply().tokens) == 200


def test_a_list_of_prompts(llm):
    prompts = [f"prompt {i}" for i in range(70)]
    replies = llm.generate(prompts, max_tokens=6)
    assert [reply.tokens for reply in replies[:4]] == [llm.generate(p, max_tokens=6).tokens for p in prompts[:4]]
    assert len(replies) == 70
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts[:3]]
    assert [reply.tokens for reply in llm.generate(ids, max_tokens=6)] == [reply.tokens for reply in replies[:3]]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts[:3]]
    replies = llm.chat(chats, max_tokens=4)
    assert [reply.tokens for reply in replies] == [llm.chat(each, max_tokens=4).tokens for each in chats]
    with pytest.raises(UsageError, match="the prompt is empty"):
        llm.generate(["a", ""], max_tokens=4)
    assert llm.generate([5, 6], max_tokens=4).finish_reason


def test_a_list_is_longer_than_the_queue(folder):
    """With the default queue, lists were refused where more than 64 replies run at once."""
    with generate.load(folder, backend="numpy", parallel=2, queue=2) as llm:
        assert [len(reply.tokens) for reply in llm.generate(["hello"] * 20, max_tokens=2)] == [2] * 20


def test_an_error_in_a_list_ends_the_others(llm):
    def fail(read, total):
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        llm.generate(["new one", "new two"], on_prefill=fail)
    assert llm.generate("hello", max_tokens=2).finish_reason == "length"


def test_two_tasks_share_a_model(llm):
    async def both():
        return await asyncio.gather(*(llm.agenerate(p, max_tokens=15) for p in ("one", "two")))

    replies = asyncio.run(both())
    assert [r.tokens for r in replies] == [llm.generate(p, max_tokens=15).tokens for p in ("one", "two")]


def test_cancel_ends_the_reply_and_keeps_the_text(llm):
    stream = llm.stream("hello")
    next(stream)
    stream.cancel()
    reply = stream.reply()
    assert reply.finish_reason == "cancelled"
    assert 0 < len(reply.tokens) < llm.context


def test_a_dropped_stream_frees_the_model_for_the_next_caller(llm):
    next(llm.stream("hello"))
    gc.collect()
    assert llm.generate("hello", max_tokens=3).finish_reason == "length"


@pytest.fixture
def steps(llm, monkeypatch):
    """Count steps of the next reply after `left` is set; the fourth step waits for `left`."""
    left, after = threading.Event(), []

    def gated(sequence, token, row):
        if sequence.new_tokens == 3:
            left.wait(10)
        if left.is_set():
            after.append(sequence.new_tokens)
        return take(sequence, token, row)

    def leave():
        left.set()
        monkeypatch.setattr(Sequence, "take", take)
        llm.generate("next", max_tokens=1)
        return len(after)

    take = Sequence.take
    monkeypatch.setattr(Sequence, "take", gated)
    return leave


@pytest.mark.parametrize("held", [True, False], ids=["in a variable", "dropped"])
def test_leaving_a_loop_ends_the_reply_within_a_step(llm, steps, held):
    stream = llm.stream("hello") if held else None
    for _ in stream or llm.stream("hello"):
        break
    assert steps() <= 1
    if stream:
        assert stream.reply().finish_reason == "cancelled"


@pytest.mark.parametrize("held", [True, False], ids=["in a variable", "dropped"])
def test_leaving_an_async_loop_ends_the_reply_within_a_step(llm, steps, held):
    async def leave():
        stream = llm.astream("hello") if held else None
        async for _ in stream or llm.astream("hello"):
            break
        assert steps() <= 1
        if stream:
            assert (await stream.reply()).finish_reason == "cancelled"

    asyncio.run(leave())


def test_an_exception_in_an_async_loop_ends_the_reply_within_a_step(llm, steps):
    async def fail():
        async for _ in llm.astream_chat(MESSAGES):
            raise RuntimeError("the reader's own")

    with pytest.raises(RuntimeError, match="the reader's own"):
        asyncio.run(fail())
    assert steps() <= 1


def test_closing_an_async_generator_over_a_stream_ends_the_reply_within_a_step(llm, steps):
    async def lines():
        async for piece in llm.astream("hello"):
            yield piece.text

    async def close():
        source = lines()
        await anext(source)
        await source.aclose()

    asyncio.run(close())
    assert steps() <= 1


def test_an_asynchronous_stream_outside_a_loop_is_one_sentence(llm):
    """The error was asyncio's: no running event loop."""
    for begin in (lambda: llm.astream("hello"), lambda: llm.astream_chat(MESSAGES)):
        with pytest.raises(UsageError, match="needs a running event loop; stream and stream_chat do not"):
            begin()


def test_cancelled_task_stops_the_reply(llm):
    async def cancelled():
        task = asyncio.create_task(llm.agenerate("hello"))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert llm.generate("hello", max_tokens=3).finish_reason == "length"


def test_errors_reach_the_caller(llm):
    with pytest.raises(UsageError, match="temperature is -1"):
        llm.generate("hello", temperature=-1)
    with pytest.raises(UsageError, match="the prompt is empty"):
        llm.generate("")
    with pytest.raises(BimetalError, match="the prompt has 300 tokens and the context holds 256"):
        llm.generate([50] * 300)
    with pytest.raises(BimetalError, match="the prompt has 300 tokens"):
        asyncio.run(llm.agenerate([50] * 300))


def test_a_tokenizer_has_what_people_know(llm):
    tokenizer, text = llm.tokenizer, "hello <|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello "
    assert tokenizer.decode(ids[0]) == "h"
    assert len(tokenizer) == tokenizer.vocab_size == 258
    assert tokenizer.vocab["<|im_end|>"] == ids[-1] == tokenizer.eos_id
    assert sorted(tokenizer.vocab.values()) == list(range(258))
    prompt = tokenizer.apply_chat_template(MESSAGES)
    assert llm.chat(MESSAGES, max_tokens=6).tokens == llm.generate(prompt, max_tokens=6).tokens
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == llm.render(MESSAGES)


@pytest.mark.parametrize("messages", [None, "hello", 5, {"role": "user", "content": "hello"}, b"hello"])
@pytest.mark.parametrize("entry", ["chat", "stream_chat", "render"])
def test_messages_are_a_list(llm, entry, messages):
    with pytest.raises(UsageError, match=r"^messages is .*; it must be a list"):
        getattr(llm, entry)(messages)


@pytest.mark.parametrize("entry", ["generate", "stream", "agenerate", "astream", "logits", "alogits"])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([10**9], "token id 1000000000 is outside the vocabulary of 258"),
        ([258], "token id 258 is outside"),
        ([10**5000], "token id <int> is outside"),
        ([5, -1], "token id -1 is outside"),
        ([1.5], "the prompt has a token id 1.5; it must be a whole number"),
        ([True], "the prompt has a token id True"),
        ([5, "a"], "the prompt has the text 'a' among token ids"),
        (MESSAGES, "the prompt is a list of messages; chat and stream_chat take messages"),
        (np.array([[1, 2]]), r"the prompt has a token id \[1, 2\]"),
        (b"hello", "the prompt is b'hello'; it must be text or a sequence of token ids"),
        (None, "the prompt is None; it must be text"),
        (5, "the prompt is 5; it must be text"),
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
    ],
)
def test_every_entry_checks_the_prompt(llm, entry, prompt, message):
    async def call():
        result = getattr(llm, entry)(prompt)
        return await result if asyncio.iscoroutine(result) else result

    with pytest.raises(UsageError, match=message):
        asyncio.run(call())


@pytest.mark.parametrize(
    "entry",
    [
        *("stream", "astream", "agenerate", "stream_chat", "astream_chat", "achat"),
        *("logits", "alogits", "score", "ascore", "aembed"),
    ],
)
def test_what_takes_one_prompt_refuses_several(llm, entry):
    """The first of them was called a token id, or a message."""
    many = [MESSAGES, MESSAGES] if "chat" in entry else ["hello", [5, 6]]

    async def call():
        result = getattr(llm, entry)(many)
        return await result if asyncio.iscoroutine(result) else result

    taker = "chat" if "chat" in entry else "embed" if "embed" in entry else "generate"
    with pytest.raises(UsageError, match=f"^{entry} takes one .*, and is given a list of 2; {taker} takes lists"):
        asyncio.run(call())


def test_wrong_values_of_a_tokenizer_and_of_scores(llm):
    with pytest.raises(UsageError, match="the text to encode is None; it must be a str"):
        llm.tokenizer.encode(None)
    with pytest.raises(UsageError, match="top is -2; it must be a whole number of at least 0"):
        asyncio.run(llm.ascore("hello", top=-2))


def test_ids_of_arrays_are_a_prompt(llm):
    ids = llm.tokenizer.encode("hello")
    for prompt in (np.array(ids), tuple(ids), list(np.array(ids, np.uint16))):
        assert llm.generate(prompt, max_tokens=4).tokens == llm.generate(ids, max_tokens=4).tokens


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_refused_instead_of_waiting(llm):
    stream = llm.stream("hello", max_tokens=2)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, fork beside threads
        child = os.fork()
    if not child:
        said = []
        for call in (lambda: llm.generate("hello", max_tokens=2), lambda: llm.logits("hello"), lambda: next(stream)):
            try:
                call()
            except BimetalError as error:
                said.append(str(error))
        llm.close()
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(said) == 3
    for line in said:
        assert line.startswith(f"the model was loaded in process {os.getpid()} and does not survive os.fork(); load it")
    assert len(stream.reply().tokens) == 2


@pytest.mark.parametrize("entry", ["generate", "logits"])
def test_a_callback_that_calls_its_model_is_refused_instead_of_waiting(llm, entry):
    with pytest.raises(BimetalError, match="a callback runs in the thread that owns the model and cannot call"):
        llm.generate(f"call {entry}", max_tokens=2, on_prefill=lambda *_: getattr(llm, entry)("hello"))
    assert llm.generate("hello", max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize(
    ("raised", "reaches"),
    [(SystemExit(3), SystemExit), (KeyboardInterrupt(), KeyboardInterrupt), (StopIteration(), RuntimeError)],
)
def test_what_a_callback_raises_reaches_its_caller(llm, raised, reaches):
    def refuse(*_):
        raise raised

    with pytest.raises(reaches):
        list(llm.stream(f"raise {raised!r}", max_tokens=2, on_prefill=refuse))
    assert llm.generate("hello", max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize("raised", [SystemExit(3), ValueError("lost")])
def test_a_guide_that_fails_ends_its_reply_alone(llm, raised):
    class Guide:
        left = 4

        def allowed(self):
            self.left -= 1
            if not self.left:
                raise raised

        def accept(self, token):
            pass

    others = [llm.stream(f"beside {i}", max_tokens=60) for i in range(2)]
    with pytest.raises(BimetalError, match=r"^the guide of the reply failed: (SystemExit: 3|ValueError: lost)"):
        llm.generate("guided", max_tokens=20, guide=Guide)
    assert [other.reply().finish_reason for other in others] == ["length"] * 2


@pytest.mark.parametrize("allowed", [[True] * 260, np.zeros(3, bool), np.ones(260, np.int8)])
def test_a_guide_that_returns_no_mask_is_named(llm, allowed):
    guide = SimpleNamespace(allowed=lambda: allowed, accept=lambda token: None)
    with pytest.raises(UsageError, match=r"^the guide allowed .*; it must return an array of bool, \(\d+,\)"):
        llm.generate("x", max_tokens=2, guide=lambda: guide)


def test_a_reweigh_that_fails_is_named(llm):
    with pytest.raises(BimetalError, match=r"^the function reweigh of the reply failed: ZeroDivisionError"):
        llm.generate("x", max_tokens=2, reweigh=lambda weights: 1 // 0)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(llm, duplicate):
    with pytest.raises(TypeError, match="cannot be copied or pickled, because one thread of this process owns"):
        duplicate(llm)
    with llm.stream("hello") as stream, pytest.raises(TypeError, match="a reply that is being written cannot be"):
        duplicate(stream)


def test_public_names(folder):
    assert set(dir(generate)) == {
        *("LLM", "AsyncStream", "BimetalError", "Gap", "Reply", "Stream", "UsageError", "load"),
        *("__doc__", "__name__", "__path__", "__version__"),
    }
    assert (generate.BimetalError, generate.UsageError) == (BimetalError, UsageError)
    for name in dir(generate):
        assert getattr(generate, name) is not None
    with pytest.raises(AttributeError, match="module 'generate' has no attribute 'laod'"):
        generate.laod  # noqa: B018


def test_bimetal_is_another_name_of_generate():
    code = "import bimetal, generate; from bimetal import load; print(bimetal is generate, bimetal.__version__)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == f"True {generate.__version__}\n"
    for name in ("generate", "bimetal"):
        command = [sys.executable, "-m", name, "--version"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert said == f"bimetal {generate.__version__}\n"


@pytest.mark.parametrize(("given", "expected"), [(None, "14"), ("26", "26")])
def test_threads_of_openblas_sleep_unless_the_user_chose(given, expected):
    """The variable is set before NumPy, whose OpenBLAS reads it as it is loaded."""
    code = "import os, sys, generate; assert 'numpy' not in sys.modules; print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    env = {key: value for key, value in os.environ.items() if key != "OPENBLAS_THREAD_TIMEOUT"}
    env |= {"OPENBLAS_THREAD_TIMEOUT": given} if given else {}
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == expected


def test_importing_generate_imports_nothing_heavy():
    """`--help` and `import generate` answer at once."""
    code = "import sys, generate; dir(generate); print({'numpy', 'tqdm', 'jinja2'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == "set()\n"


def test_loading_errors_reach_the_caller(folder, tmp_path):
    with pytest.raises(UsageError, match="backend 'tpu' is unknown; supported: cuda, mlx, numpy"):
        generate.load(str(folder), backend="tpu")
    with pytest.raises(UsageError, match="ctx is 0"):
        generate.load(str(folder), backend="numpy", ctx=0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BimetalError):
        generate.load(str(tmp_path), backend="numpy")


@pytest.mark.skipif(find_spec("mlx_lm") is not None, reason="mlx-lm is installed")
def test_another_architecture_names_the_extra_that_may_run_it(tmp_path):
    config = write(tmp_path) / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gemma9"'))
    with pytest.raises(BimetalError, match=r"model_type is 'gemma9'; supported: .*; .*'bimetal\[mlx-lm\]'"):
        generate.load(tmp_path, backend="numpy")


def test_no_chat_template_is_said(tmp_path):
    with (
        generate.load(str(write(tmp_path, template=None)), backend="numpy") as llm,
        pytest.raises(BimetalError, match="no chat template"),
    ):
        llm.chat(MESSAGES)


def test_a_closed_model_refuses_and_its_stream_ends(folder):
    with generate.load(str(folder), backend="numpy") as llm:
        stream = llm.stream("hello")
        next(stream)
    assert stream.reply().finish_reason == "cancelled"
    with pytest.raises(BimetalError, match="is closed; load it again"):
        llm.generate("hello")
    with pytest.raises(BimetalError, match="is closed; load it again"):
        _ = llm.activity
    with pytest.raises(BimetalError, match="is closed; load it again"):
        _ = llm.step_tokens
    llm.close()  # twice is once


@pytest.mark.parametrize(
    "entry",
    [
        lambda llm: llm.generate("hello"),
        lambda llm: asyncio.run(llm.agenerate("hello")),
        lambda llm: llm.logits("hello"),
        lambda llm: asyncio.run(llm.ascore("hello")),
        lambda llm: llm.matched_tokens("hello"),
        lambda llm: llm.warm_up(),
        lambda llm: asyncio.run(llm.acheck()),
        lambda llm: llm.activity,
        lambda llm: llm.step_tokens,
    ],
)
@pytest.mark.parametrize("ends", [True, False], ids=["thread ended", "model freed"])
def test_a_model_that_another_thread_closes_during_a_call_refuses_it(folder, monkeypatch, entry, ends):
    """After the call has found it open: when all is closed, or between freeing the model and the thread's end."""
    llm = generate.load(str(folder), backend="numpy")
    check, once = llm._check_open, [llm.close if ends else lambda: llm._owner.put(llm._free).result(10)]

    def checked():
        check()
        if once:
            once.pop()()

    monkeypatch.setattr(llm, "_check_open", checked)
    with pytest.raises(BimetalError, match="is closed"):
        entry(llm)
    llm.close()


def test_calls_that_begin_while_a_model_is_closed_keep_it_from_nothing(folder):
    """Between any two lines by which the calls in progress are found."""
    llm = generate.load(str(folder), backend="numpy")
    streams = [llm.stream("hello") for _ in range(3)]

    def begin(frame, event, argument):
        if "weakref" in frame.f_code.co_filename and len(streams) < 40:
            with suppress(BimetalError):  # it is closed by then
                streams.append(llm.stream("hello"))
        return begin

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        llm.close()
    finally:
        sys.settrace(before)
    assert len(streams) > 3
    assert all(stream.reply().finish_reason for stream in streams)
    assert not llm._owner._thread.is_alive()


def test_a_dropped_model_is_freed_with_its_thread(folder):
    llm = generate.load(str(folder), backend="numpy")
    llm.generate("hello", max_tokens=2)
    gone, thread = weakref.ref(llm), llm._owner._thread
    del llm
    gc.collect()
    thread.join(5)
    assert gone() is None
    assert not thread.is_alive()


@pytest.mark.parametrize(("parallel", "rows"), [(1, 4096), (2, SHARED_PREFILL_ROWS)])
def test_steps_of_a_prompt_are_short_where_replies_run_side_by_side(parallel, rows, monkeypatch):
    """A reply waits for the step of another's prompt, so that a backend that prefers long steps gets shorter ones."""
    monkeypatch.setattr(NumpyOps, "prefill_rows", 4096)
    with generate.load("demo", backend="numpy", parallel=parallel) as llm:
        assert llm._engine.model.ops.prefill_rows == rows


def test_what_comes_at_once_wakes_an_event_loop_once():
    async def run():
        loop, due = asyncio.get_running_loop(), []
        inbox = Inbox(loop, due.append)
        queues, woken = [asyncio.Queue() for _ in range(16)], []
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *job: (woken.append(1), wake(*job))
        for _ in range(2):
            for at, queue in enumerate(queues):
                inbox.put(queue, at)
            (deliver,) = due
            due.clear()
            deliver()
            assert [await queue.get() for queue in queues] == [*range(16)]
        return len(woken)

    assert asyncio.run(run()) == 2


def test_threads_get_what_was_put_once_it_is_delivered():
    due, queues = [], [SimpleQueue() for _ in range(3)]
    outbox = Outbox(due.append)
    for n in range(2):
        for at, reader in enumerate(queues):
            outbox.put(reader, (n, at))
            outbox.put(reader, "more")
        assert all(reader.empty() for reader in queues)
        (deliver,) = due
        due.clear()
        deliver()
        assert [(reader.get_nowait(), reader.get_nowait()) for reader in queues] == [
            ((n, at), "more") for at in range(3)
        ]


def test_what_has_come_is_delivered_before_a_job_runs():
    """A turn leaves pieces to the next launch, which a long job would put off."""
    done, turned, queued = list[str](), threading.Event(), threading.Event()
    reader: SimpleQueue[str] = SimpleQueue()
    owner, loop = OwnerThread("owner", lambda: None), asyncio.new_event_loop()
    loop.call_soon_threadsafe = lambda *job: done.append("woken")
    inbox = owner.inbox(loop)

    def turn():
        if not turned.is_set():
            inbox.put(asyncio.Queue(), "a token")
            owner.outbox.put(reader, "a token")
            turned.set()
        return queued.wait(10)

    owner.turn = turn
    owner.wake()
    assert turned.wait(10)
    job = owner.put(lambda: done.append(f"job after {reader.qsize()}"))
    queued.set()
    job.result(10)
    owner.put(lambda: setattr(owner, "turn", lambda: False)).result(10)
    owner.close()
    loop.close()
    assert done == ["woken", "job after 1"]


@pytest.fixture
def reading(llm, monkeypatch):
    """A text of 200 tokens that is read in steps of 8, and what ran: "step" of the text, "token" of a reply."""
    monkeypatch.setattr("common.scores.PREFILL_ROWS", 8)
    monkeypatch.setattr("common.attention_scores.ROWS", 8)
    monkeypatch.setattr("generate.owner_thread.MOST_PAUSE", 0.0)
    ids, ran, take, run = [*range(2, 202)], list[str](), Sequence.take, NumpyOps.run

    def noted(self, compute, state, step):
        if getattr(state, "capacity", 0) == len(ids):
            ran.append("step")
        return run(self, compute, state, step)

    monkeypatch.setattr(NumpyOps, "run", noted)
    monkeypatch.setattr(Sequence, "take", lambda *of: ran.append("token") or take(*of))
    return ids, ran


ABOUT_A_TEXT = {
    "logits": lambda llm, ids: llm.logits(ids),
    "alogits": lambda llm, ids: asyncio.run(llm.alogits(ids)),
    "score": lambda llm, ids: llm.score(ids, top=2),
    "ascore": lambda llm, ids: asyncio.run(llm.ascore(ids, top=2)),
    "attention_to": lambda llm, ids: llm.attention_to(ids, 8),
}


@pytest.mark.parametrize("entry", ABOUT_A_TEXT)
def test_a_reply_goes_on_while_a_text_is_read(llm, reading, monkeypatch, entry):
    ids, ran = reading
    options = {"max_tokens": 120, "logprobs": 2, "logit_bias": {id: -100 for id in llm.tokenizer.end_ids}}
    expected, reply, take = ABOUT_A_TEXT[entry](llm, ids), llm.generate("hello", **options), Sequence.take
    begun, put, found = threading.Event(), threading.Event(), list[object]()

    def held(*of):
        begun.set()
        put.wait(10)
        return take(*of)

    monkeypatch.setattr(Sequence, "take", held)
    ran.clear()
    stream = llm.stream("hello", **options)
    assert begun.wait(10)
    threads = [threading.Thread(target=lambda: found.append(ABOUT_A_TEXT[entry](llm, ids))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while llm._owner._jobs.qsize() < 2:
        time.sleep(0.001)
    put.set()
    beside = stream.reply()
    for thread in threads:
        thread.join(10)
    assert (beside.tokens, beside.logprobs) == (reply.tokens, reply.logprobs)
    assert all(np.array_equal(each, expected) for each in found)
    assert len(found) == 2
    assert ran.count("step") >= 50
    assert ("step", "step") not in set(pairwise(ran))
    assert ran[-1] == "token"


def test_a_long_job_takes_half_of_the_time_beside_turns(monkeypatch):
    now, ran, owner = [0.0], list[str](), OwnerThread("owner", lambda: None)
    monkeypatch.setattr("generate.owner_thread.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def pass_time(name, seconds):
        now[0] += seconds
        ran.append(name)

    def steps():
        for seconds in (3, 0.5, 100, 1):
            pass_time("step", seconds)
            yield
        return "done"

    def turn():
        pass_time("turn", 1)
        return True

    owner.put(lambda: setattr(owner, "turn", turn)).result(10)
    monkeypatch.setattr("generate.owner_thread.MOST_PAUSE", 5)
    assert owner.put(steps()).result(10) == "done"
    owner.put(lambda: setattr(owner, "turn", lambda: False)).result(10)
    owner.close()
    while ran[0] == "turn":
        del ran[0]
    assert " ".join(ran).startswith(f"step{3 * ' turn'} step turn step{5 * ' turn'} step turn")


def test_a_long_job_that_fails_ends_alone():
    def steps(result):
        yield
        return 1 // result

    owner = OwnerThread("owner", lambda: None)
    jobs = [owner.put(steps(result)) for result in (0, 1)]
    with pytest.raises(ZeroDivisionError):
        jobs[0].result(10)
    assert jobs[1].result(10) == 1
    owner.close()


def test_a_cancelled_task_ends_the_reading_of_its_text(llm, reading, monkeypatch):
    ids, ran = reading
    run, started, left = NumpyOps.run, threading.Event(), threading.Event()

    def held(*of):
        if ran.count("step") == 3:
            started.set()
            left.wait(10)
        return run(*of)

    async def leave():
        tasks = [asyncio.create_task(llm.ascore(ids)) for _ in range(2)]
        await asyncio.to_thread(started.wait, 10)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in ended] == [asyncio.CancelledError] * 2

    monkeypatch.setattr(NumpyOps, "run", held)
    asyncio.run(leave())
    left.set()
    assert llm.logits([5, 6]).shape == (2, 258)
    assert ran.count("step") <= 4


@pytest.mark.parametrize("entry", ABOUT_A_TEXT)
def test_closing_a_model_ends_the_reading_of_texts(folder, reading, monkeypatch, entry):
    ids, ran = reading
    run, started, found = NumpyOps.run, threading.Event(), list[object]()

    def held(*of):
        if ran.count("step") == 3:
            started.set()
            while llm._shut.alive:
                time.sleep(0.001)
        return run(*of)

    def ask():
        try:
            found.append(ABOUT_A_TEXT[entry](llm, ids))
        except BimetalError as error:
            found.append(str(error))

    llm = generate.load(folder, backend="numpy")
    monkeypatch.setattr(NumpyOps, "run", held)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    while not (llm._owner._jobs.qsize() or len(llm._owner._long) == 2):
        time.sleep(0.001)
    llm.close()
    for thread in threads:
        thread.join(10)
    assert found == ["the model is closed"] * 2
    assert ran.count("step") <= 4


def test_jobs_that_come_after_the_end_are_refused():
    owner = OwnerThread("owner", lambda: None)
    owner.close()
    for job in (lambda: None, (None for _ in range(3))):
        with pytest.raises(BimetalError, match="closed"):
            owner.put(job).result(10)
    with pytest.raises(BimetalError, match="closed"):
        owner.wake()


def test_a_turn_that_fails_at_the_end_keeps_the_thread_from_nothing(capsys):
    ended = threading.Event()
    owner = OwnerThread("owner", ended.set)

    def turn():
        raise OSError(5, "the device is gone")

    owner.put(lambda: setattr(owner, "turn", turn)).result(10)
    owner.close()
    assert ended.is_set()
    assert "the device is gone" in capsys.readouterr().err
    with pytest.raises(BimetalError, match="closed"):
        owner.put(lambda: None).result(10)


@pytest.mark.parametrize("shown", [True, False])
def test_a_list_of_prompts_has_one_bar(folder, monkeypatch, shown):
    bars = []

    class Bar(tqdm):
        def __init__(self, *args, **how):
            super().__init__(*args, **how, file=io.StringIO())
            bars.append((self, how["disable"]))

    monkeypatch.setattr("generate.llm.tqdm", Bar)
    with generate.load(folder, backend="numpy", ctx=256, progress=shown) as llm:
        llm.generate(["abc", "de", "f"] * 4, max_tokens=2)
        llm.generate("one", max_tokens=2)
    ((bar, hidden),) = bars
    assert (bar.total, hidden) == (12, not shown)
    assert bar.n == (12 if shown else 0)


def test_a_progress_bar_whose_terminal_is_gone_ends_no_reply(folder, monkeypatch):
    def gone(*args, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(progress, "tqdm", gone)
    monkeypatch.setattr(progress, "PREFILL_ROWS", 8)
    with generate.load(folder, backend="numpy", ctx=256, progress=True) as llm:
        assert llm.generate("a prompt of more than eight tokens", max_tokens=3).finish_reason == "length"


def test_a_closed_event_loop_is_freed_with_what_it_never_fetched():
    """Items of a queue that nobody reads any more hold neither the queue nor its event loop."""
    inboxes, loop, due = weakref.WeakKeyDictionary(), asyncio.new_event_loop(), []
    items = asyncio.Queue()
    with pytest.raises(TimeoutError):  # a queue that has been waited for knows its loop
        loop.run_until_complete(asyncio.wait_for(items.get(), 0.01))
    inbox = inboxes.setdefault(loop, Inbox(loop, due.append))
    inbox.put(items, "fetched by nobody")
    due.pop()()
    loop.close()
    inbox.put(items, "too late")
    due.pop()()
    freed = weakref.ref(loop)
    del loop, items, inbox
    gc.collect()
    assert freed() is None
    assert not inboxes


def test_packages_say_that_they_state_types():
    """Editors and mypy take every call for Any without the file; tests/typed_calls.py has the types."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("bimetal", "generate", "common"):
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in settings[package]
