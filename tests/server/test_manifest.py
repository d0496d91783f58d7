"""The Kubernetes manifest: what KubeRay's resource definition and Kubernetes refuse of it, without a cluster."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples/deploy/rayservice.yaml").read_text())
SCHEMA = json.loads((ROOT / "tests/data/kuberay_schema.json").read_text())
CLUSTER = MANIFEST["spec"]["rayClusterConfig"]
PODS = [group["template"]["spec"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]


def faults(manifest) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(manifest)]


def test_kuberays_definition_accepts_it() -> None:
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("ray.io/v1", "RayService")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", MANIFEST["metadata"]["name"])
    assert faults(MANIFEST) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda spec: spec.pop("rayClusterConfig") and spec.update(rayCluster={}), "'rayCluster' was unexpected"),
        (lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="2"), "'2' is not of type"),
        (lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].pop("groupName"), "'groupName' is a required"),
        (
            lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(gpu=1),
            "'gpu' was unexpected",
        ),
    ],
)
def test_faults_are_found(change, fault) -> None:
    """The schema refuses fields that it does not know, wrong types, and what is missing."""
    manifest = copy.deepcopy(MANIFEST)
    change(manifest["spec"])
    assert any(fault in each for each in faults(manifest)), faults(manifest)


def test_pods_are_whole() -> None:
    """Names that refer to one another do, requests are limits, and Ray's replies may finish before a pod ends."""
    for pod in PODS:
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]
            ports = [port["containerPort"] for port in container["ports"]]
            assert len(ports) == len(set(ports))
    (application,) = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])["applications"]
    (worker,), workers = PODS[1]["containers"], CLUSTER["workerGroupSpecs"][0]
    assert PODS[1]["terminationGracePeriodSeconds"] > application["args"]["grace"]
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == application["args"]["gpus_per_replica"]
    sizes = application["args"]["replicas"], application["args"]["max_replicas"]
    assert sizes == (workers["minReplicas"], workers["maxReplicas"])
