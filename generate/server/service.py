"""The served model: loading, admission, and the end."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from common.options import GenerationOptions
from generate import __version__
from generate.llm import LLM
from generate.server.compression import Compressor
from generate.server.errors import RETRY, ApiError
from generate.server.facts import Facts, facts_of
from generate.server.metrics import Metrics
from generate.server.store import Store

SHOWN = (  # options of generation that /props shows also where nothing sets them
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "max_tokens"),
)


class Service:
    """One model and the requests that it works on.

    max_requests  most requests that run or wait
    replica       the name of this server among several, a label of its figures
    options       of generation, for requests that leave them out
    running       requests that run or wait now
    slots         sequences that the model works on at once
    draining      whether the server shuts down: running requests are finished, and no other begins
    store         finished responses that requests may continue
    compressor    shortens long prompts; None: they are not shortened
    short_jobs    a thread that prepares short prompts one after the other; many threads at once would all finish late
    """

    def __init__(self, max_requests: int, replica: str | None = None, options: Mapping[str, Any] | None = None):
        self.max_requests, self.running, self.slots, self.draining = max_requests, 0, 1, False
        self.metrics, self.options = Metrics(replica), dict(options or {})
        self.store = Store()
        self.compressor: Compressor | None = None
        self.short_jobs = ThreadPoolExecutor(1, "bimetal prompts")
        self._llm: LLM | None = None
        self._facts: Facts | None = None

    def load(self, make: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        """Call `make` in a new thread, and afterwards `ended` in the same thread, with the error or None.

        make  loads the model and passes it to this service
        """

        def run() -> None:
            try:
                started = time.perf_counter()
                make()
                self.metrics.load_seconds = time.perf_counter() - started
            except BaseException as error:
                ended(error)
            else:
                ended(None)

        threading.Thread(target=run, name="bimetal loading", daemon=True).start()

    def serve(self, llm: LLM, name: str, warms_up: bool = False) -> None:
        """Take requests for a loaded model, after `LLM.warm_up` if `warms_up`."""
        if warms_up:
            llm.warm_up()
        llm.tokenizer.least_tokens("")  # reads the vocabulary once, which takes 0.2 s for 150,000 tokens
        self._facts = facts_of(llm, name, self.options.get("max_tokens"))
        self.slots = llm.parallel
        self.metrics.histograms["iteration_tokens_total"] = llm.step_tokens
        self._llm = llm

    @property
    def is_ready(self) -> bool:
        return self._llm is not None

    @property
    def llm(self) -> LLM:
        """Return the model; raises ApiError while it is being loaded."""
        if self._llm is None:
            raise ApiError(503, "Loading model", retry=RETRY)
        return self._llm

    @property
    def facts(self) -> Facts:
        """Return facts about the model; raises ApiError while it is being loaded."""
        if self._facts is None:
            raise ApiError(503, "Loading model", retry=RETRY)
        return self._facts

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it runs; raises ApiError if there are too many, and while the server shuts down."""
        if self.draining:
            raise ApiError(503, "the server shuts down", retry=RETRY)
        if self.running >= self.max_requests:
            self.metrics.counters["admission_rejections"] += 1
            raise ApiError(503, f"{self.running} requests run or wait, which is the most allowed", retry=RETRY)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def metrics_text(self) -> str:
        """Return the figures of this server in Prometheus' format."""
        cache = {"num_slots": str(self.slots), "max_model_len": str(self.facts.context)}
        return self.metrics.text(self.facts.name, self.gauges(), cache)

    def gauges(self) -> dict[str, tuple[float, str]]:
        """Return the current values, by name, with their meaning."""
        drafted = self.metrics.counters["spec_decode_num_draft_tokens"]
        accepted = self.metrics.counters["spec_decode_num_accepted_tokens"]
        now = self.llm.activity
        found = {
            "num_requests_running": (now.running, "replies that are generated"),
            "num_requests_waiting": (now.waiting, "replies that wait"),
            "kv_cache_usage_perc": (now.context_share, "share of the tokens that all slots may hold"),
            "prefix_cache_bytes": (now.prefix_bytes, "states that the prefix cache keeps in memory"),
            "prefix_cache_budget_bytes": (now.prefix_budget, "most of these bytes"),
            "memory_peak_bytes": (self.llm.peak_bytes, "the most memory that the backend has held"),
            "model_load_seconds": (self.metrics.load_seconds, "time that loading the model took"),
            "draft_acceptance_ratio": (accepted / max(drafted, 1), "accepted share of the draft tokens"),
        }
        self.metrics.counters["num_preemptions"] = now.preemptions
        return found | self._expert_gauges()

    def _expert_gauges(self) -> dict[str, tuple[float, str]]:
        """Return the figures of streamed experts."""
        stats = self.llm.expert_stats
        if stats is None:
            return {}
        return {
            "expert_hit_ratio": (stats.hit_rate, "share of the needed experts that were in memory"),
            "expert_read_bytes": (stats.bytes_read, "bytes of experts that were read"),
            "expert_read_seconds_p50": (stats.read_p50, "median time of a read"),
            "expert_read_seconds_p95": (stats.read_p95, "95th percentile of the time of a read"),
            "expert_wait_seconds": (stats.wait, "time that layers waited for experts"),
            "expert_evictions": (stats.evictions, "experts that left memory for another"),
            "expert_peak_bytes": (stats.peak, "the most memory that experts have taken"),
        }

    def props(self) -> dict[str, Any]:
        """Describe the server, under llama.cpp's names."""
        facts = self.facts
        settings = {"n_ctx": facts.context, "params": self._params()}
        return {
            "default_generation_settings": settings,
            "total_slots": self.slots,
            "model_path": facts.name,
            "model_alias": facts.name,
            **facts.control_texts,
            "chat_template": facts.template,
            "chat_template_caps": caps_of(facts),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"bimetal {__version__}",
            "backend": self.llm.backend,
            "capabilities": {"tools": facts.takes_tools, "thinking": facts.thinks},
            "speculative": self.options.get("spec", self.llm.default_spec),
            "prefix_cache": self._prefix_cache(),
            "prefill_compression": None if self.compressor is None else self.compressor.shown(),
            "is_sleeping": False,
        }

    def _params(self) -> dict[str, Any]:
        """Return the options of a request that gives none, under our names and llama.cpp's; -1 is no limit, no seed."""
        plain = GenerationOptions()
        found = {name: getattr(plain, name) for name in SHOWN} | {**self.llm.recommended_options, **self.options}
        found |= {name: -1 for name in ("max_tokens", "seed") if found[name] is None}
        return found | {"n_predict": found["max_tokens"], "repeat_penalty": found["repetition_penalty"]}

    def _prefix_cache(self) -> dict[str, int]:
        """Count the tokens that the prefix cache holds, and those that it has saved so far."""
        now, counters = self.llm.activity, self.metrics.counters
        found = {"bytes": now.prefix_bytes, "budget_bytes": now.prefix_budget}
        return found | {"queries": counters["prefix_cache_queries"], "hits": counters["prefix_cache_hits"]}

    def slots_list(self) -> list[dict[str, Any]]:
        """Return the sequences that the model can work on at once, under llama.cpp's names; the busy ones come first.

        n_past  tokens of prompt and reply that a busy slot holds
        """
        now, context = self.llm.activity, self.facts.context
        lengths = [*now.lengths, *[0] * self.slots]
        return [
            {"id": at, "n_ctx": context, "is_processing": at < now.running, "n_past": lengths[at]}
            for at in range(self.slots)
        ]

    def close(self) -> None:
        """End running requests, and free the model."""
        self.draining = True
        if self._llm is not None:
            self._llm.close()
        if self.compressor is not None:
            self.compressor.drafter.close()


def caps_of(facts: Facts) -> dict[str, bool]:
    """List what the model's chat template can write, under llama.cpp's names."""
    template = facts.template
    return {
        "supports_system_role": bool(template),
        "supports_tools": facts.takes_tools,
        "supports_tool_calls": facts.takes_tools,
        "supports_parallel_tool_calls": facts.takes_tools,
        "supports_preserve_reasoning": "reasoning_content" in template,
        "supports_string_content": bool(template),
        "supports_typed_content": False,
    }
