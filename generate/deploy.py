"""Replicas of the server on Ray Serve: `serve run generate.deploy:app model=demo replicas=4 gpus_per_replica=1`."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.middleware import Middleware

from common.errors import UsageError
from generate import server_flags
from generate.affinity import PromptAffinity
from generate.cli import parse
from generate.llm import LLM
from generate.loading import PARALLEL
from generate.server.app import build
from generate.server.errors import RETRY
from generate.server.guard import Guard
from generate.server.log import Log
from generate.server.metrics import PREFIX
from generate.server.serve import compression_of, load_compressor, policy_of, upstream_of
from generate.server.service import Service

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
OWN = ("replicas", "max_replicas", "gpus_per_replica", "cpus_per_replica")
RAYS = ("host", "port")  # of Ray's proxy, which listens in place of the server
QUEUED = 8  # requests queued in a replica, so that no slot waits for Ray
TARGET = 0.7  # share of a replica's slots above which another replica is started


def app(args: dict[str, Any]) -> serve.Application:
    """Build the application from `key=value` arguments: those in OWN, and the flags of `serve` with _ for -.

    replicas          smallest number of replicas (default 1)
    max_replicas      largest number, started while the others are busy (default: `replicas`)
    gpus_per_replica  GPUs that Ray reserves for each (default 0)
    cpus_per_replica  cores that Ray reserves for each, and threads of its libraries (default 1)
    """
    sizes = {name: _amount(name, args[name]) for name in OWN if name in args}
    replicas, most = (int(sizes.get(name, sizes.get("replicas", 1))) for name in ("replicas", "max_replicas"))
    if not 1 <= replicas <= most:
        raise UsageError(f"replicas={replicas} and max_replicas={most}; 1 <= replicas <= max_replicas is supported")
    flags = _flags({name: value for name, value in args.items() if name not in OWN})
    parsed = parse(["serve", *flags])
    policy_of(parsed)
    compression_of(parsed)
    if upstream_of(parsed) is not None:
        raise UsageError("replicas have models of their own; prefill_upstream_base goes with serve alone")
    slots = parsed.load.parallel or PARALLEL
    scale = {"min_replicas": replicas, "max_replicas": most, "target_ongoing_requests": TARGET * slots}
    deployment = serve.deployment(
        name="bimetal",
        max_ongoing_requests=slots + QUEUED,
        max_queued_requests=parsed.max_queue,
        backpressure_config={"retry_after_s": RETRY},
        graceful_shutdown_timeout_s=parsed.grace,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        ray_actor_options={
            "num_cpus": sizes.get("cpus_per_replica", 1),
            "num_gpus": sizes.get("gpus_per_replica", 0),
        },
        **({"num_replicas": replicas} if replicas == most else {"autoscaling_config": scale}),
    )(Replica)
    return deployment.bind(flags)


def proxy() -> list[Middleware]:
    """Return the middleware of Ray's proxies: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=generate.deploy:proxy."""
    return [Middleware(PromptAffinity)]


@serve.ingress()
class Replica:
    """One server with a model of its own; Ray sends it requests once the model is loaded."""

    def __init__(self, flags: list[str]):
        args = parse(["serve", *flags])
        self._policy, self._log = policy_of(args), Log(args.log_json)
        self._service = Service(args.max_queue, serve.get_replica_context().replica_id.unique_id, args.options)
        load_compressor(self._service, args.load.backend, compression_of(args))
        self._service.serve(LLM(args.model, args.load, window=args.window), args.model, args.warmup)
        self._figures = Figures()

    def __serve_build_asgi_app__(self) -> Guard:
        return build(self._service, self._policy, self._log)

    async def check_health(self) -> None:
        """Raise if the model's thread or its device does not answer; report the server's figures to Ray."""
        await self._service.llm.acheck()
        self._figures.pass_on(self._service)

    def __del__(self) -> None:
        self._service.close()


class Figures:
    """Reports a server's figures to Ray's metrics, which add the replica's name."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._passed: dict[str, float] = {}

    def pass_on(self, service: Service) -> None:
        for name, (value, meaning) in service.gauges().items():
            self._metric(serve.metrics.Gauge, name, meaning).set(value)
        for name, (value, meaning) in service.metrics.totals().items():
            more = value - self._passed.get(name, 0)
            self._passed[name] = value
            if more > 0:
                self._metric(serve.metrics.Counter, name, meaning).inc(more)

    def _metric(self, make: Any, name: str, meaning: str) -> Any:
        if name not in self._metrics:
            self._metrics[name] = make(PREFIX.replace(":", "_") + name, description=meaning)
        return self._metrics[name]


def _amount(name: str, value: Any) -> float:
    try:
        amount = float(value)
    except (TypeError, ValueError):
        amount = -1.0
    whole = name.endswith("replicas")
    if not 0 <= amount < 1e6 or (whole and amount != int(amount)):
        raise UsageError(f"{name}={value} must be a {'whole ' if whole else ''}number of at least {int(whole)}")
    return amount


def _flags(given: Mapping[str, Any]) -> list[str]:
    """Return the flags of `serve` for `key=value` arguments; refuses those of Ray's proxy."""
    if name := next((name for name in RAYS if name in given), None):
        raise UsageError(f"{name} is that of Ray's proxy; give it to Ray: serve start --http-{name} {given[name]}")
    return server_flags.flags_of(given)
