"""Flags of `bench`, and the options of the job that they name."""

import argparse
from dataclasses import fields
from typing import Any

from common.errors import UsageError
from common.options import CacheChoice
from generate import flags, values
from generate.bench_options import (
    JOBS,
    BenchOptions,
    LocalBench,
    ModelBench,
    ServeBench,
    SpecBench,
    StreamsBench,
    SyntheticBench,
    SyntheticSpecBench,
    SyntheticWindowBench,
)
from generate.flags import BACKENDS, Parser


def options(args: argparse.Namespace) -> BenchOptions:
    """Return the options of the job that the flags of `bench` name; refuses flags of another job."""
    if args.spec_prompts is not None and args.synthetic is not None:
        raise UsageError(
            "--spec-prompts and --synthetic exclude each other; random weights accept hardly any draft token"
        )
    if args.serve is not None and (args.spec_prompts or args.synthetic):
        raise UsageError("--serve asks a server for its own model; leave out --spec-prompts and --synthetic")
    job: type[BenchOptions] = ModelBench if args.spec_prompts is None else SpecBench
    if args.synthetic is not None:
        job = SyntheticBench if args.draft is None else SyntheticSpecBench
        job = SyntheticWindowBench if args.wedlm else job
    job = job if args.streams is None else StreamsBench
    job = job if args.serve is None else ServeBench
    takes = {each: _taken(each) for each in JOBS}
    known = set().union(*takes.values())
    given = {name: value for name, value in vars(args).items() if name in known and value is not None}
    if other := next((name for name in sorted(given) if name not in takes[job]), None):
        flag = f"--{other.replace('_', '-')}"
        places = " or ".join(dict.fromkeys(each.job.replace(f" {flag}", "") for each in JOBS if other in takes[each]))
        raise UsageError(f"{flag} goes with {places}, not with {job.job}")
    _check_companions(args)
    cache = {name: given.pop(name) for name in CacheChoice.__dataclass_fields__ if name in given}
    if issubclass(job, LocalBench):
        given["cache"] = CacheChoice(**cache)
    return job(**given)


def _taken(job: type[BenchOptions]) -> set[str]:
    """Return the flags that a job takes, by name; those of a cache stand for its choice."""
    names = {field.name for field in fields(job)}
    return names - {"cache"} | ({*CacheChoice.__dataclass_fields__} if "cache" in names else set())


def _check_companions(args: argparse.Namespace) -> None:
    """Refuse flags that have no effect beside the others, or without others."""
    if args.log is None and (other := next((name for name in ("verdict", "note") if getattr(args, name)), None)):
        raise UsageError(f"--{other} goes with --log FILE: it is a column of the log")
    if args.spec_prompts is not None and args.draft is None and args.tree_topk is not None:
        raise UsageError("--tree-topk needs --draft: without one no tree is drafted")
    if args.rate is not None and args.concurrency is not None:
        raise UsageError("--rate and --concurrency exclude each other; each says when requests start")


def bench(p: Parser) -> None:
    """Add the flags of `bench`, whose default is None: bench_options.py has the defaults of each job."""
    p.add_argument("named", nargs="?", metavar="MODEL", help="the model to measure, in place of --model")
    flags.model(p, (*BACKENDS, "all"))
    p.set_defaults(model=None)
    p.hints["--spec"] = "bench measures every speculative mode on the prompts of --spec-prompts FILE"
    p.add_argument(
        "--contexts",
        type=values.counts,
        metavar="N,N",
        help="prompt tokens of each row (default: 128,512,2048; with --streams or a synthetic draft 128, --wedlm 512)",
    )
    _synthetic(p)
    p.add_argument(
        "--streams",
        type=values.counts,
        metavar="N,N",
        help="numbers of concurrent replies, such as 1,4,16: speed, time to the first token, time between tokens",
    )
    p.add_argument("--new-tokens", type=values.positive, metavar="N", help="decoded tokens of each run (default: 64)")
    p.add_argument(
        "--runs",
        type=values.positive,
        metavar="N",
        help="runs of each row, of which the median is printed (default: 5)",
    )
    p.add_argument(
        "--memory",
        metavar="SIZE",
        help="limit of each GPU's memory on CUDA, of the model's elsewhere, such as 24GB (default: what is free)",
    )
    flags.cache(p)
    _experts(p.add_argument_group("experts of a synthetic mixture"))
    _speculation(p.add_argument_group("speculative decoding"))
    _server(p.add_argument_group("a server"))
    p.add_argument(
        "--peer", choices=("mlx-lm",), help="also time this program on the same weights (a safetensors folder)"
    )
    p.add_argument(
        "--log", type=values.file, metavar="FILE", help="append the rows to a TSV file such as BENCHMARKS.tsv"
    )
    p.add_argument("--verdict", choices=("keep", "drop", "info"), help="verdict, for the log")
    p.add_argument("--note", metavar="TEXT", help="reason, for the log")


def _synthetic(p: Parser) -> None:
    p.add_argument(
        "--synthetic",
        metavar="SHAPE:RECIPE",
        help="in a model's place: real shapes with random weights, such as qwen3.6-27b:q4_k_m",
    )
    p.add_argument(
        "--rows",
        type=values.counts,
        metavar="N,N",
        help="with --synthetic: rows of the steps (default: 1,2,4,8,16,22,32,64)",
    )
    p.add_argument(
        "--prefill", type=values.counts, metavar="N,N", help="with --synthetic: tokens of a prompt (default: 512,8192)"
    )
    p.add_argument(
        "--wedlm",
        action="store_true",
        default=None,
        help="with --synthetic: measure steps of a WeDLM window, the choice of tokens included",
    )


def _experts(p: Any) -> None:
    p.add_argument("--spark", action="store_true", default=None, help="hot experts in VRAM, cold ones in host memory")
    p.add_argument("--expert-vram", metavar="SIZE", help="VRAM for experts: 10GB, or a share of them such as 60%%")
    p.add_argument("--routing", metavar="FILE", help="replay this routing trace (examples/routing_trace.py)")


def _speculation(p: Any) -> None:
    p.add_argument(
        "--spec-prompts",
        metavar="FILE",
        help='decode the prompts of a JSON Lines file, {"prompt": text}, in every speculative mode',
    )
    p.add_argument(
        "--prompts", type=values.positive, metavar="N", help="number of prompts of --spec-prompts (default: 16)"
    )
    flags.draft(p, "mtp, demo, or a draft, named as a model; synthetic with --synthetic")
    p.add_argument("--tree-budget", type=values.budget, metavar="N", help="draft tokens per step (default: auto)")
    p.add_argument(
        "--tree-topk", type=values.positive, metavar="N", help="candidates of a tree at each position (default: 8)"
    )
    p.add_argument("--budgets", type=values.budgets, metavar="N,N", help="measure also trees of exactly N draft tokens")
    p.add_argument("--temperature", type=values.number, metavar="X", help="with --spec-prompts: 0 is greedy (default)")
    p.add_argument(
        "--top-p", type=values.number, metavar="X", help="with --spec-prompts: probability kept (default: 1)"
    )


def _server(group: Any) -> None:
    group.add_argument(
        "--serve",
        type=values.url,
        metavar="URL",
        help="load test of the server at URL, this one or another with the same routes",
    )
    group.add_argument("--requests", type=values.positive, metavar="N", help="requests in all (default: 64)")
    group.add_argument("--concurrency", type=values.positive, metavar="N", help="requests at a time (default: 16)")
    group.add_argument(
        "--rate", type=values.above_zero, metavar="X", help="start X requests per second, in place of --concurrency"
    )
    group.add_argument(
        "--prompt-tokens",
        type=values.positive,
        metavar="N",
        help="tokens of a prompt, without those of the chat template (default: 128)",
    )
    group.add_argument(
        "--seed",
        type=values.count,
        metavar="N",
        help="make the same prompts as a run with this seed (default: new ones, which no cache holds)",
    )
    group.add_argument("--timeout", type=values.above_zero, metavar="S", help="most seconds of a reply (default: 600)")
    group.add_argument("--api-key", metavar="KEY", help="the server's key")
