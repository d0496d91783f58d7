"""Two replicas of the demo on Ray Serve, on this machine: what clients of Ray's proxy see."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import UsageError

httpx = pytest.importorskip("httpx", reason="the ray extra is not installed")

ROOT = Path(__file__).parents[2]
CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
ARGUMENTS = ("model=demo", "backend=numpy", "ctx=512", "parallel=4", "replicas=2", "cpus_per_replica=0.5", "grace=120")
REPLICA = re.compile(r'bimetal:num_requests_running\{model_name="demo",replica="(\w+)"\} (\d+)')

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def ray():
    """A small Ray, which finds this code and our middleware."""
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    given = {"PYTHONPATH": str(ROOT), CALLBACK: "generate.deploy:proxy", "RAY_SERVE_LOG_TO_STDERR": "0"}
    given |= {"RAY_USAGE_STATS_ENABLED": "0", "OPENBLAS_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
        try:
            yield ray
        finally:
            from ray import serve

            serve.shutdown()
            ray.shutdown()


def deployed(*more):
    """Deploy what `serve run generate.deploy:app key=value...` deploys; returns when it runs."""
    from ray import serve
    from ray.serve.scripts import convert_args_to_dict

    from generate.deploy import app

    serve.run(app(convert_args_to_dict((*ARGUMENTS, *more))), name="bimetal", route_prefix="/")


@pytest.fixture(scope="module")
def url(ray):
    """The proxy before two replicas."""
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployed()
    return f"http://127.0.0.1:{port}"


def request_of(prompt, tokens, ends=()):
    """A streamed completion; `ends` are tokens that it may not choose."""
    bias = {str(id): -100 for id in ends}
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "logit_bias": bias}


def ask(url, body, **headers):
    """(text, error) of a streamed completion; an error is a status, a word of the stream, or an exception's name."""
    text, is_done = "", False
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=120) as reply:
            if reply.status_code != 200:
                return text, reply.status_code
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    data = json.loads(line[6:])
                    if "error" in data:
                        return text, "error"
                    text += data["choices"][0]["text"]
    except httpx.TransportError as error:
        return text, type(error).__name__
    return text, None if is_done else "cut"


def running(url, session):
    """(replica, replies that it generates) of the replica to which a session goes."""
    text = httpx.get(f"{url}/metrics", headers={"x-session-id": session}, timeout=60).text
    name, count = REPLICA.search(text).groups()
    return name, int(count)


def sessions_by_replica(url, most=32):
    """A session of each of the two replicas."""
    found = {}
    for number in range(most):
        found.setdefault(running(url, f"s{number}")[0], f"s{number}")
        if len(found) == 2:
            return found
    raise AssertionError(f"{most} sessions went to {len(found)} replicas")


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def options(**args):
    """Ray's options of the deployment that `app` builds."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    from generate.deploy import app

    return app(args)._bound_deployment._deployment_config


def test_arguments_become_rays_options() -> None:
    config = options(model="demo", replicas="2", max_replicas="4", parallel="10", grace="7", max_queue="9")
    scale = config.autoscaling_config
    assert (scale.min_replicas, scale.max_replicas, scale.target_ongoing_requests) == (2, 4, 7)
    assert (config.max_ongoing_requests, config.max_queued_requests) == (18, 9)
    assert config.graceful_shutdown_timeout_s == 7
    assert options(replicas=3, log_json=True, insecure=False, allow_host=["a", "b"]).num_replicas == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"host": "0.0.0.0"}, "host is that of Ray's proxy"),
        ({"replicas": "0"}, "1 <= replicas <= max_replicas"),
        ({"replicas": "1.5"}, "replicas=1.5 must be a whole number"),
        ({"replicas": "3", "max_replicas": "2"}, "replicas=3 and max_replicas=2"),
        ({"gpus_per_replica": "one"}, "gpus_per_replica=one must be a number"),
        ({"gpu": "1"}, "unrecognized arguments: --gpu=1"),
        ({"parallel": "0"}, "'0' is not a whole number of at least 1"),
    ],
)
def test_arguments_that_are_refused(args, message) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        options(**args)


def test_the_manifest_is_rays() -> None:
    """Its config file passes Ray's schema, and its arguments are ours."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    import yaml
    from ray.serve.schema import ServeDeploySchema

    spec = yaml.safe_load((ROOT / "examples/deploy/rayservice.yaml").read_text())["spec"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "generate.deploy:app"
    workers = spec["rayClusterConfig"]["workerGroupSpecs"][0]
    scale = options(**application.args).autoscaling_config
    assert (scale.min_replicas, scale.max_replicas) == (workers["minReplicas"], workers["maxReplicas"])
    groups = [spec["rayClusterConfig"]["headGroupSpec"], workers]
    for container in (group["template"]["spec"]["containers"][0] for group in groups):
        assert {"name": CALLBACK, "value": "generate.deploy:proxy"} in container["env"]


PROMPTS = ["def add(a, b):", "class Stack:", "import os\n", "for i in range(", "def fib(n):", "x = [", "try:\n", "#"]


def test_streams_equal_one_servers(url, demo) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: ask(url, request_of(prompt, 24)), PROMPTS))
    alone = [demo.generate(prompt, max_tokens=24, temperature=0).text for prompt in PROMPTS]
    assert found == [(text, None) for text in alone]


def test_a_session_stays_on_its_replica(url) -> None:
    for name, session in sessions_by_replica(url).items():
        assert {running(url, session)[0] for _ in range(8)} == {name}


def test_a_conversation_without_a_session_stays_on_one_replica(url) -> None:
    def finished():
        figures = [httpx.get(f"{url}/metrics", headers={"x-session-id": each}).text for each in sessions]
        return [int(re.search(r"generation_tokens_total\{.*\} (\d+)", text)[1]) for text in figures]

    sessions, messages = sessions_by_replica(url).values(), [{"role": "user", "content": "Write a class."}]
    before = finished()
    for _ in range(4):
        body = {"messages": messages, "max_tokens": 8}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    assert sorted(now - then > 0 for now, then in zip(finished(), before, strict=True)) == [False, True]


def test_a_client_that_leaves_ends_its_reply(url, demo) -> None:
    name, session = next(iter(sessions_by_replica(url).items()))
    body, headers = request_of("def add", 480, demo.tokenizer.end_ids), {"x-session-id": session}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as reply:
        lines = reply.iter_lines()  # a generator that is dropped closes the connection
        next(lines)
        wait_for(lambda: running(url, session) == (name, 1))
        left = time.monotonic()
    wait_for(lambda: running(url, session) == (name, 0))
    assert time.monotonic() - left < 10


@contextmanager
def streams(url, demo, sessions):
    """Four long streams of each session, which all run; yields a list, in the end of ((text, error), session)."""
    body, found = request_of("def add", 200, demo.tokenizer.end_ids), []
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, url, body, **{"x-session-id": each}) for each in sessions for _ in range(4)]
        wait_for(lambda: sum(running(url, each)[1] for each in sessions) == len(asked))
        yield found
        found += [(asked[at].result(), sessions[at // 4]) for at in range(len(asked))]


def test_a_killed_replica_costs_its_own_clients_alone(ray, url, demo) -> None:
    whole = ask(url, request_of("def add", 200, demo.tokenizer.end_ids))
    assert whole[1] is None
    (killed, session), (_, other) = sessions_by_replica(url).items()
    with streams(url, demo, (session, other)) as found:
        ray.kill(ray.get_actor(f"SERVE_REPLICA::bimetal#bimetal#{killed}", namespace="serve"))
    for reply, of in found:
        if of == other:
            assert reply == whole
        else:
            assert whole[0].startswith(reply[0])
            assert reply[1] in ("error", "cut", "RemoteProtocolError", 500, 503)
    assert ask(url, request_of("def add", 200, demo.tokenizer.end_ids), **{"x-session-id": session}) == whole
    wait_for(lambda: killed not in (now := sessions_by_replica(url)) and len(now) == 2)


def test_an_update_lets_replies_finish(url, demo) -> None:
    before = sessions_by_replica(url)
    with streams(url, demo, tuple(before.values())) as found:
        deployed("max_queue=100")
    assert {error for (_, error), _ in found} == {None}
    assert not sessions_by_replica(url).keys() & before.keys()


def test_rays_metrics_name_the_replica(ray, url) -> None:
    names = sessions_by_replica(url).keys()
    assert ask(url, request_of("def add", 8))[1] is None
    node = ray.nodes()[0]
    place = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def counted():
        lines = [line for line in httpx.get(place).text.splitlines() if "bimetal_generation_tokens_total{" in line]
        return any(name in line for line in lines for name in names)

    wait_for(counted)


def test_a_deletion_lets_replies_finish(ray, url, demo) -> None:
    from ray import serve

    with streams(url, demo, tuple(sessions_by_replica(url).values())) as found:
        serve.delete("bimetal")
    assert {error for (_, error), _ in found} == {None}


def test_another_replica_starts_while_one_is_busy(url, demo) -> None:
    """One replica of four slots, with four clients that ask again and again: Ray waits 30 s, then starts another."""
    from ray import serve

    serve.delete("bimetal")  # an update keeps two replicas until they have been idle
    deployed("replicas=1", "max_replicas=2")
    body, is_over, errors = request_of("def add", 200, demo.tokenizer.end_ids), threading.Event(), list[object]()

    def asks() -> None:
        while not is_over.is_set():
            errors.append(ask(url, body)[1])

    def replicas() -> int:
        return len({running(url, f"s{number}")[0] for number in range(8)})

    assert replicas() == 1
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(asks)
        try:
            wait_for(lambda: replicas() == 2, 180)
        finally:
            is_over.set()
    assert errors
    assert set(errors) == {None}
