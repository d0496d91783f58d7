"""Write kuberay_schema.json: the part of KubeRay's resource definition for the fields that our manifest has.

Run: python tests/data/make_kuberay_schema.py ray.io_rayservices.yaml
of KubeRay 1.7.0 (Apache-2.0): helm-chart/kuberay-operator/crds. Again after the manifest has got new fields. As for
`kubectl apply --dry-run=server --validate=strict`, fields that the definition does not list are refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
MANIFEST = HERE.parents[1] / "examples/deploy/rayservice.yaml"
KEPT = ("type", "required", "enum", "pattern", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength")


def pruned(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """The JSON schema of `values`, in which fields that none of them has may hold anything."""
    found = {name: schema[name] for name in KEPT if name in schema}
    if schema.get("x-kubernetes-int-or-string"):
        found |= {"type": ["integer", "string"]}
    objects = [value for value in values if isinstance(value, dict)]
    if "properties" in schema:
        known = schema["properties"].items()
        found["properties"] = {
            name: pruned(each, [value[name] for value in objects if name in value])
            if any(name in value for value in objects)
            else {}
            for name, each in known
        }
        found["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    elif isinstance(each := schema.get("additionalProperties"), dict):
        found["additionalProperties"] = pruned(each, [value for held in objects for value in held.values()])
    if isinstance(each := schema.get("items"), dict):
        found["items"] = pruned(each, [value for held in values if isinstance(held, list) for value in held])
    return found


def main(path: str) -> None:
    definition = yaml.load(Path(path).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema = pruned(version["schema"]["openAPIV3Schema"], [yaml.safe_load(MANIFEST.read_text())])
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}  # Kubernetes' own, for every resource
    (HERE / "kuberay_schema.json").write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
