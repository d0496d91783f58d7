"""Options of each job of `bench`, with defaults. Imports nothing heavy, so that `--help` is fast."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from common.errors import UsageError
from common.options import CacheChoice, Sampling


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of every job.

    job      the job in words, for messages
    log      a TSV file that rows are appended to
    verdict  what the logged rows decided: "keep", "drop" or "info"
    """

    job: ClassVar[str]
    log: str | None = None
    verdict: str = "info"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LocalBench(BenchOptions):
    """Options of the jobs that run a model here.

    memory  most that the process takes of each GPU's memory, such as "24GB"
    """

    backend: str | None = None
    devices: Sequence[int] | None = None
    split: Sequence[float] | None = None
    tensor_parallel: int | None = None
    memory: str | None = None
    cache: CacheChoice = field(default_factory=CacheChoice)


@dataclass(frozen=True, kw_only=True)
class DraftOptions(LocalBench):
    """Options of the jobs with a draft."""

    draft: str | None = None
    draft_device: int | None = None
    tree_topk: int = 8


@dataclass(frozen=True, kw_only=True)
class ModelBench(LocalBench):
    """Prefill and decode speed of a model; `backend` may be "all"."""

    job = "a model alone"
    model: str = "demo"
    ctx: int | None = None
    contexts: Sequence[int] = (128, 512, 2048)
    new_tokens: int = 64
    runs: int = 5
    peer: str | None = None

    def __post_init__(self) -> None:
        _at_least("--new-tokens", self.new_tokens, 2)
        if self.backend == "all" and self.peer:
            raise UsageError("--backend all goes with a model alone, not with --peer")


@dataclass(frozen=True, kw_only=True)
class SpecBench(DraftOptions):
    """Speculative modes on the prompts of the file `spec_prompts`.

    temperature, top_p  sampling of every mode, plain decoding included; the seed of a prompt is its number
    """

    job = "--spec-prompts"
    spec_prompts: str
    model: str = "demo"
    ctx: int | None = None
    prompts: int = 16
    new_tokens: int = 64
    tree_budget: int | None = None
    budgets: Sequence[int] = ()
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the options of generation that draw tokens."""
        return {"temperature": self.temperature, "top_p": self.top_p}

    def __post_init__(self) -> None:
        _refuse_all(self)
        _at_least("--new-tokens", self.new_tokens, 2)
        Sampling(**self.sampling)
        if self.budgets and self.draft is None:
            raise UsageError("--budgets needs --draft: it sweeps the tree of a draft")


@dataclass(frozen=True, kw_only=True)
class SyntheticBench(LocalBench):
    """Steps and prefill of a model of real shapes and random weights."""

    job = "--synthetic"
    synthetic: str
    contexts: Sequence[int] = (128, 512, 2048)
    rows: Sequence[int] = (1, 2, 4, 8, 16, 22, 32, 64)
    prefill: Sequence[int] = (512, 8192)
    runs: int = 5
    spark: bool = False
    expert_vram: str | None = None
    routing: str | None = None

    def __post_init__(self) -> None:
        _refuse_all(self)
        if self.spark != (self.expert_vram is not None):
            raise UsageError("--spark and --expert-vram go together in a bench, which measures a given budget")
        if self.spark and self.routing is None:
            raise UsageError("--spark needs --routing: random routers choose uniformly, which no cache can use")


@dataclass(frozen=True, kw_only=True)
class SyntheticSpecBench(DraftOptions):
    """Parts of a speculative step of a synthetic model and draft."""

    job = "--synthetic --draft"
    synthetic: str
    contexts: Sequence[int] = (128,)
    runs: int = 5
    budgets: Sequence[int] = (15, 22, 31, 63, 127)

    def __post_init__(self) -> None:
        _refuse_all(self)
        if self.draft != "synthetic":
            raise UsageError(f"--draft is {self.draft!r}; with --synthetic it is synthetic")
        if len(self.contexts) > 1:
            raise UsageError("a synthetic draft takes one of --contexts")


@dataclass(frozen=True, kw_only=True)
class SyntheticWindowBench(LocalBench):
    """Steps of a WeDLM window, of a model of real shapes and random weights."""

    job = "--synthetic --wedlm"
    synthetic: str
    wedlm: bool
    contexts: Sequence[int] = (512,)
    runs: int = 5

    def __post_init__(self) -> None:
        _refuse_all(self)


@dataclass(frozen=True, kw_only=True)
class StreamsBench(LocalBench):
    """Several replies at once, of a model or of real shapes with random weights."""

    job = "--streams"
    streams: Sequence[int]
    model: str = "demo"
    synthetic: str | None = None
    draft: str | None = None
    draft_device: int | None = None
    contexts: Sequence[int] = (128,)
    new_tokens: int = 64

    def __post_init__(self) -> None:
        _refuse_all(self)
        _at_least("--new-tokens", self.new_tokens, 2)
        if self.synthetic is not None and self.draft is not None:
            raise UsageError("--streams takes --synthetic or --draft: random weights accept hardly any draft token")
        if len(self.contexts) > 1:
            raise UsageError("--streams takes one of --contexts")


@dataclass(frozen=True, kw_only=True)
class ServeBench(BenchOptions):
    """Requests to a server.

    concurrency  requests that run at once, unless `rate`, requests begun per second on average, is given
    timeout      seconds that a reply may take
    seed         of the random prompts; None: other prompts in every run, so that no prefix cache has them
    """

    job = "--serve"
    serve: str
    model: str | None = None
    api_key: str | None = None
    requests: int = 64
    concurrency: int = 16
    rate: float | None = None
    prompt_tokens: int = 128
    new_tokens: int = 64
    timeout: float = 600.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _at_least("--new-tokens", self.new_tokens, 2)


JOBS: tuple[type[BenchOptions], ...] = (
    ModelBench,
    SpecBench,
    SyntheticBench,
    SyntheticSpecBench,
    SyntheticWindowBench,
    StreamsBench,
    ServeBench,
)


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{flag} is {value}; it must be at least {least}")


def _refuse_all(options: LocalBench) -> None:
    if options.backend == "all":
        raise UsageError(f"--backend all goes with a model alone, not with {options.job}")
