"""`python -m generate serve`: a server over one model, from its flags to its end."""

import argparse
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from common.checkpoint import open_checkpoint
from common.errors import BimetalError, UsageError
from common.hub import find_model
from generate.flags import LOAD, OPTIONS
from generate.llm import LLM
from generate.machines import check_load
from generate.server import proxy
from generate.server.app import build
from generate.server.compression import KEEP_RATIO, Compression, compressor_for
from generate.server.connection import Connection
from generate.server.guard import Policy, host_name, key_of, keys_of
from generate.server.log import Log, forwarding
from generate.server.service import Service
from generate.server.upstream import Upstream

KEY, UPSTREAM_KEY = "BIMETAL_API_KEY", "BIMETAL_UPSTREAM_KEY"
MOST_HEAD = 1 << 16  # most bytes of a request's line and headers
THRESHOLD = 32_000  # prompt tokens from which auto compresses
CLOSING = 5  # seconds for connections after the grace time
BACKLOG = 2048
SWITCH = 0.0005  # seconds: the model's thread asks for the interpreter after each wait for the device


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return 0 if a SIGTERM or Ctrl-C let all replies finish."""
    policy, compression, upstream = policy_of(args), compression_of(args), upstream_of(args)
    check_loading(args)
    log, service = Log(args.log_json), Service(args.max_queue, options=args.options)
    served = {"model": args.model} if upstream is None else {"upstream": upstream.base}
    app = build(service, policy, log) if upstream is None else proxy.build(service, upstream, policy, log)
    server = Server(config_of(app, timeout_graceful_shutdown=args.grace + CLOSING), service, log, args.grace)
    errors: list[BaseException] = []

    listening = listen(args.host, args.port)
    served = {"url": url_of(listening)} | served

    def ended(error: BaseException | None) -> None:
        if error is None:
            size = {"context": service.llm.context, "parallel": service.slots} if service.is_ready else {}
            log.line("ready", **served, **size, seconds=round(service.metrics.load_seconds, 1))
        else:
            log.line("failed", **served)  # the error is printed when the server has ended
            errors.append(error)
            server.should_exit = True

    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    log.line("loading", **served)  # until it is ready, the server answers with status 503

    def make() -> None:
        load_compressor(service, args.load.backend, compression)
        if upstream is None:
            service.serve(LLM(args.model, args.load, window=args.window), args.model, args.warmup)

    service.load(make, ended)
    try:
        with forwarding(log), switching(SWITCH):
            server.run([listening])
    finally:
        service.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if errors:
        raise errors[0]
    return 0


def check_loading(args: argparse.Namespace) -> None:
    """Refuse models that do not exist, and paths without one, before listening: BimetalError, UsageError."""
    check_load(args.load)
    drafts = [name for name in (args.draft, args.prefill_drafter) if name not in (None, "mtp", "demo")]
    for name in drafts if args.prefill_upstream_base else [args.model, *drafts]:
        path = find_model(name)
        if path is not None:
            open_checkpoint(path)


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Set, for a block, the time after which a computing thread releases the interpreter lock to waiting threads."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def policy_of(args: argparse.Namespace) -> Policy:
    """Decide who may call; refuses to listen beyond this machine without a key."""
    keys = keys_of(args.api_key or [], args.api_key_file, os.environ.get(KEY))
    if not keys and not args.insecure and not is_loopback(args.host):
        raise UsageError(
            f"--host {args.host} is reached from other machines: give --api-key-file FILE, set {KEY}, or choose "
            "--insecure to serve anybody"
        )
    hosts = [host_name(host) for host in args.allow_host or ()]
    return Policy(keys, hosts, args.cors_origin or ())


def compression_of(args: argparse.Namespace) -> Compression | None:
    """Read the options of prompt compression; None: prompts are not compressed."""
    mode, drafter = args.prefill_compression, args.prefill_drafter
    if (mode == "off") != (drafter is None):
        needs = "needs --prefill-drafter MODEL" if drafter is None else "goes without --prefill-drafter"
        raise UsageError(f"--prefill-compression {mode} {needs}")
    given = [name for name in ("curve", "keep_ratio", "threshold") if getattr(args, f"prefill_{name}") is not None]
    if drafter is None:
        if given:
            raise UsageError(f"--prefill-{given[0].replace('_', '-')} needs --prefill-compression auto or always")
        return None
    if mode != "auto" and "threshold" in given:
        raise UsageError(f"--prefill-threshold goes with --prefill-compression auto, not with {mode}")
    curve, ratio = args.prefill_curve, args.prefill_keep_ratio
    if curve is not None and ratio is not None:
        raise UsageError("--prefill-curve goes without --prefill-keep-ratio, whose place it takes")
    threshold = (args.prefill_threshold or THRESHOLD) if mode == "auto" else 0
    return Compression(drafter, curve or ((1, ratio or KEEP_RATIO),), threshold)


def upstream_of(args: argparse.Namespace) -> Upstream | None:
    """Return the server that answers in place of a model of our own; None: there is none."""
    base, model, file = args.prefill_upstream_base, args.prefill_upstream_model, args.prefill_upstream_key_file
    if base is None:
        if model is not None or file is not None:
            flag = "--prefill-upstream-model" if model is not None else "--prefill-upstream-key-file"
            raise UsageError(f"{flag} needs --prefill-upstream-base URL")
        return None
    if args.prefill_compression == "off":
        raise UsageError("--prefill-upstream-base needs --prefill-compression auto or always")
    if (own := flag_of_model(args)) is not None:
        raise UsageError(f"--prefill-upstream-base goes without {own}, which has no effect: no model is loaded")
    return Upstream(base, key_of(file, os.environ.get(UPSTREAM_KEY)), model)


def flag_of_model(args: argparse.Namespace) -> str | None:
    """Return the first given flag that applies only to a local model, or None. The compressor has --backend too."""
    names = [name for name in ("model", "warmup") if name in args.given]
    names += [name for name in (*LOAD, *OPTIONS) if name != "backend" and getattr(args, name, None) is not None]
    if not names:
        return None
    switched_off = "no-" if getattr(args, names[0]) is False else ""
    return f"--{switched_off}{names[0].replace('_', '-')}"


def load_compressor(service: Service, backend: str | None, compression: Compression | None) -> None:
    """Load the compressor of prompts, if any, before the model, which takes the remaining memory."""
    if compression is not None:
        service.compressor = compressor_for(backend, compression)


def config_of(app: Any, **more: Any) -> uvicorn.Config:
    """Configure the HTTP server, with our own protocol: uvicorn would choose httptools, which bounds no headers."""
    return uvicorn.Config(
        app,
        http=Connection,
        h11_max_incomplete_event_size=MOST_HEAD,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        **more,
    )


def listen(host: str, port: int) -> socket.socket:
    """Open the socket to listen on; raises BimetalError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # Python repeats the address after this
        raise BimetalError(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from None


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Test whether only this machine reaches an address to listen on."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server(uvicorn.Server):
    """uvicorn's server with a grace time at its end: running replies continue, and new requests are refused."""

    def __init__(self, config: uvicorn.Config, service: Service, log: Log, grace: float):
        super().__init__(config)
        self._service, self._log, self._grace = service, log, grace

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin the end on the first signal; end at once on the second."""
        super().handle_exit(sig, frame)
        self._captured_signals.clear()  # a handled signal is not raised again
        if not self._service.draining:
            self._service.draining = True
            self._log.line("draining", running=self._service.running, seconds=self._grace)
            end = threading.Timer(self._grace, partial(self._service.close))
            end.daemon = True
            end.start()
