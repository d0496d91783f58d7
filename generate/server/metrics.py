"""Figures for Prometheus: vLLM's names with our prefix, and figures of speculative decoding and memory."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from common.engine import STEP_TOKENS
from common.histogram import Histogram
from generate.server.events import CallBegin, Event, Failed, Finish, Reasoning, Text
from generate.server.task import Task

PREFIX = "bimetal:"
MEDIA = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LONG_SECONDS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
CHOICES = (1, 2, 5, 10, 20)
ENDS = ("stop", "length", "abort", "error")


HISTOGRAMS = {
    "time_to_first_token_seconds": ("seconds from a request to the first token of its reply", SECONDS),
    "inter_token_latency_seconds": ("seconds between events of a reply that bring text", SECONDS),
    "request_time_per_output_token_seconds": ("seconds of decoding per token", SECONDS),
    "e2e_request_latency_seconds": ("seconds from a request to the end of its reply", LONG_SECONDS),
    "request_queue_time_seconds": ("seconds from a request to its prefill", LONG_SECONDS),
    "request_prefill_time_seconds": ("seconds of prefill", LONG_SECONDS),
    "request_decode_time_seconds": ("seconds of decoding", LONG_SECONDS),
    "request_inference_time_seconds": ("seconds of prefill and decoding", LONG_SECONDS),
    "request_prompt_tokens": ("prompt tokens of a reply", TOKENS),
    "request_generation_tokens": ("tokens of a reply", TOKENS),
    "request_max_num_generation_tokens": ("tokens of the longest reply to a request", TOKENS),
    "request_prefill_kv_computed_tokens": ("prompt tokens of a reply that were not taken from a cache", TOKENS),
    "iteration_tokens_total": ("tokens of a step: those of a prompt, or the new ones of replies", STEP_TOKENS),
    "request_params_n": ("replies asked for by a request", CHOICES),
    "request_params_max_tokens": ("max_tokens of requests that have one", TOKENS),
}
COUNTERS = {
    "prompt_tokens": "prompt tokens of finished replies",
    "prompt_tokens_cached": "prompt tokens of finished replies that were taken from a cache",
    "generation_tokens": "tokens of finished replies",
    "prefix_cache_queries": "prompt tokens that were looked up in the prefix cache",
    "prefix_cache_hits": "prompt tokens that were found in the prefix cache",
    "prefill_compression_dropped_tokens": "tokens that compression left out of prompts, as its drafter counts them",
    "admission_rejections": "requests refused because too many ran or waited",
    "num_preemptions": "replies suspended for lack of memory, to continue later",
    "spec_decode_num_drafts": "steps that verified draft tokens",
    "spec_decode_num_draft_tokens": "draft tokens that were verified",
    "spec_decode_num_accepted_tokens": "draft tokens that were accepted",
}


class Metrics:
    """Counts what a server does.

    replica  the server's name among several; None: it is alone
    """

    def __init__(self, replica: str | None = None) -> None:
        self.replica = replica
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.finished: Counter[str] = Counter()
        self.by_position: Counter[int] = Counter()
        self.load_seconds = 0.0

    @contextmanager
    def counting(self, task: Task, started: float) -> Iterator[Callable[[int, Event], None]]:
        """Yield a function that counts each event, with its reply's index, of a request that arrived at `started`."""
        self.observe("request_params_n", task.n)
        if (limit := task.options.get("max_tokens")) is not None:
            self.observe("request_params_max_tokens", limit)
        latest: dict[int, float] = {}
        left, longest = len(task.prompts) * task.n, 0

        def count(index: int, event: Event) -> None:
            nonlocal left, longest
            match event:
                case Text() | Reasoning() | CallBegin():
                    now = time.perf_counter()
                    first = index not in latest
                    name = "time_to_first_token_seconds" if first else "inter_token_latency_seconds"
                    self.observe(name, now - latest.get(index, started))
                    latest[index] = now
                case Finish():
                    left, longest = left - 1, max(longest, event.usage.completion)
                    self._finish(event, time.perf_counter() - started)
                case Failed():
                    left -= 1
                    self.finished["error"] += 1

        try:
            yield count
        finally:
            self.finished["abort"] += left  # the client left, or another reply to the request failed
            self.observe("request_max_num_generation_tokens", longest)

    def observe(self, name: str, value: float) -> None:
        """Count a value in the histogram `name`."""
        self.histograms[name].observe(value)

    def _finish(self, finish: Finish, seconds: float) -> None:
        usage, stats = finish.usage, finish.stats
        self.finished["length" if finish.reason == "length" else "stop"] += 1
        self.counters["prompt_tokens"] += usage.prompt
        self.counters["generation_tokens"] += usage.completion
        self.counters["prefix_cache_queries"] += usage.prompt
        self.counters["prefix_cache_hits"] += usage.cached
        self.counters["prompt_tokens_cached"] += usage.cached
        self.observe("e2e_request_latency_seconds", seconds)
        self.observe("request_prompt_tokens", usage.prompt)
        self.observe("request_generation_tokens", usage.completion)
        self.observe("request_prefill_kv_computed_tokens", usage.prompt - usage.cached)
        if stats is None:
            return
        busy = stats.prefill_seconds + stats.decode_seconds
        self.observe("request_prefill_time_seconds", stats.prefill_seconds)
        self.observe("request_decode_time_seconds", stats.decode_seconds)
        self.observe("request_inference_time_seconds", busy)
        self.observe("request_queue_time_seconds", max(0.0, seconds - busy))
        if stats.new_tokens > 1:
            self.observe("request_time_per_output_token_seconds", stats.decode_seconds / (stats.new_tokens - 1))
        if stats.accepted is not None:
            steps = stats.accepted.steps - stats.accepted.budgets[0]
            self.counters["spec_decode_num_drafts"] += steps
            self.counters["spec_decode_num_draft_tokens"] += usage.accepted + usage.rejected
            self.counters["spec_decode_num_accepted_tokens"] += usage.accepted
            for length, count in stats.accepted.lengths.items():
                for position in range(length - 1):
                    self.by_position[position] += count

    def totals(self) -> dict[str, tuple[float, str]]:
        """Return values that only grow, by name, with their meaning: counters, and sum and count of each histogram."""
        found: dict[str, tuple[float, str]] = {
            f"{name}_total": (self.counters[name], COUNTERS[name]) for name in COUNTERS
        }
        for name, (meaning, _) in HISTOGRAMS.items():
            histogram = self.histograms[name]
            found |= {f"{name}_sum": (histogram.sum, meaning), f"{name}_count": (sum(histogram.counts), meaning)}
        return found

    def text(self, model: str, gauges: dict[str, tuple[float, str]], cache: Mapping[str, str] | None = None) -> str:
        """Return all figures in Prometheus' text format.

        gauges  further ones, with their meanings
        cache   settings of the model's cache, which are labels of `cache_config_info`
        """
        names = {"model_name": model} | ({} if self.replica is None else {"replica": self.replica})
        label, lines = ",".join(f'{name}="{_escaped(value)}"' for name, value in names.items()), list[str]()

        def head(name: str, kind: str, meaning: str) -> str:
            lines.extend((f"# HELP {PREFIX}{name} {meaning}", f"# TYPE {PREFIX}{name} {kind}"))
            return PREFIX + name

        for name, (value, meaning) in gauges.items():
            lines.append(f"{head(name, 'gauge', meaning)}{{{label}}} {value:.10g}")
        if cache is not None:
            settings = "".join(f',{name}="{_escaped(value)}"' for name, value in cache.items())
            lines.append(f"{head('cache_config_info', 'gauge', 'settings of the cache')}{{{label}{settings}}} 1")
        for name, meaning in COUNTERS.items():
            lines.append(f"{head(f'{name}_total', 'counter', meaning)}{{{label}}} {self.counters[name]}")
        full = head("request_success_total", "counter", "replies by how they ended")
        lines += [f'{full}{{{label},finished_reason="{r}"}} {self.finished[r]}' for r in ENDS]
        full, cached = (
            head("prompt_tokens_by_source_total", "counter", "prompt tokens by source"),
            self.counters["prompt_tokens_cached"],
        )
        sources = {"local_compute": self.counters["prompt_tokens"] - cached, "local_cache_hit": cached}
        lines += [f'{full}{{{label},source="{source}"}} {count}' for source, count in sources.items()]
        full = head("spec_decode_num_accepted_tokens_per_pos_total", "counter", "accepted draft tokens by position")
        lines += [f'{full}{{{label},position="{at}"}} {count}' for at, count in sorted(self.by_position.items())]
        for name, (meaning, bounds) in HISTOGRAMS.items():
            full, histogram, below = head(name, "histogram", meaning), self.histograms[name], 0
            for bound, count in zip([*map(str, bounds), "+Inf"], histogram.counts, strict=True):
                below += count
                lines.append(f'{full}_bucket{{{label},le="{bound}"}} {below}')
            lines += [f"{full}_sum{{{label}}} {histogram.sum:.10g}", f"{full}_count{{{label}}} {below}"]
        return "\n".join([*lines, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
