"""The manifests of each platform: the workflow, its volume, locks, rights and limits.

``manifests/base`` is the platform ``cluster``: some files are written by hand, three are generated from
``configs/platforms/cluster.yaml``. ``manifests/overlays/<platform>`` holds only the differences, as patches generated
from ``configs/platforms/<platform>.yaml``. ``kubectl apply -k manifests/overlays/<platform>`` works without Slipway;
``documents_of`` returns the same objects without kubectl.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from pipeline.cluster import gateway, store_commands
from pipeline.cluster import objects as cluster_objects
from pipeline.settings.config import RunConfig, load, names
from pipeline.settings.platform import ClientSettings
from pipeline.workflow import pods
from pipeline.workflow.definition import workflow_template
from stages.parts.base.errors import ConfigError
from stages.parts.base.files import write_text
from stages.parts.cluster.kinds import Object
from stages.parts.records.rollout import LOCAL
from stages.parts.releases.signing import verifier
from stages.rollout.kserve.objects import SIGNING, TRUSTED_KEY

MANIFESTS: Final = Path(__file__).parents[2] / "manifests"
SHARED: Final = "cluster"
"""The platform that the others extend."""
WRITTEN: Final = ("namespace.yaml", "accounts.yaml", "network.yaml", "nightly.yaml", "watch.yaml")
"""Files of ``manifests/base`` that are written by hand. Their namespace is ``NAMESPACE``."""
TRIGGERS: Final = {"events": "events", "poll": "events/poll", "fleet": "events/fleet"}
"""The folders of what starts runs, by the names that ``slipway render`` takes."""
WITH_IMAGES: Final = ("events/receiver.yaml", "events/poll/poll.yaml", "events/fleet/fleet.yaml")
"""Written by hand, but for the images: these are the platform's, so that a registry is named in one place."""
IMAGE: Final = re.compile(r"(?<=image: )\S*/slipway-slim:\S+")
NAMESPACE: Final = "slipway"
CLIENTS: Final = Path("envoy-gateway/clients/gateway.yaml")
BUDGETS: Final = CLIENTS.with_name("budgets.yaml")
EXAMPLE: Final = ClientSettings(
    file=str(MANIFESTS / CLIENTS.with_name("clients.yaml")),
    hosts=("*.example.com",),
    issuer="letsencrypt",
    prometheus="monitoring",
)
"""What the examples in ``CLIENTS`` and ``BUDGETS`` are rendered with."""
EXAMPLE_MADE: Final = (
    "# Made from clients.yaml by: make manifests. An example: slipway install applies your platform's.\n"
)
MADE: Final = "# Made from configs/platforms/{}.yaml by: make manifests\n"


def documents_of(config: RunConfig) -> list[Object]:
    """Make all objects of a platform, in an order to apply them. Raises: ConfigError: it is not a cluster."""
    cluster, namespace = config.cluster, config.platform.namespace
    clients, image = cluster.clients, config.platform.image_of("serve")
    objects = [
        *_written(namespace, *(MANIFESTS / "base" / file for file in WRITTEN)),
        *cluster_objects.of(config.platform, cluster),
        *_verification_key(config),
        workflow_template(config),
        *store_commands.of(config),
        *(gateway.of(namespace, clients, image, config.kserve) if clients else []),
    ]
    return list({_identity(body): body for body in objects}.values())


def _verification_key(config: RunConfig) -> Iterator[Object]:
    """Yield the ConfigMap with the key by which pods verify releases, if there is one. Raises: ConfigError: it is not a
    public key: a private one would be shown to all who may read the namespace."""
    if path := config.serving.verification_key:
        verifier(Path(path))
        data = {TRUSTED_KEY.name: Path(path).read_text(encoding="utf-8")}
        yield cluster_objects.labelled("ConfigMap", SIGNING, config.platform.namespace, data=data)


def of_folder(folder: str, namespace: str) -> list[Object]:
    """Read the objects of a folder of ``manifests/``, for a pipeline in *namespace*: ``kserve``, what rollouts need if
    KServe is installed; ``monitoring``, what Prometheus scrapes and alerts by; ``envoy-gateway``, what refuses at the
    gateway, too, what endpoints do not offer."""
    return list(_written(namespace, *_listed(MANIFESTS / folder)))


def for_triggers(trigger: str, config: RunConfig) -> list[Object]:
    """Read the objects that start runs, and give them the namespace, the image and the variables of the platform.

    *trigger* is a key of ``TRIGGERS``. Raises: ConfigError: the platform is one machine.
    """
    cluster, platform = config.cluster, config.platform
    trusted = pods.TRUSTED if cluster.certificates else {}
    variables = [{"name": name, "value": value} for name, value in (trusted | cluster.environment).items()]
    files = _listed(MANIFESTS / TRIGGERS[trigger])
    objects = list(_written(platform.namespace, *files, image=platform.image_of("resolve")))
    for spec in (body.get("spec", {}) for body in objects):
        for template in spec.get("templates", []):
            if container := template.get("container"):  # it asks the Hub
                container["env"] += variables
                if cluster.certificates:
                    spec["volumes"].append({"name": pods.CERTIFICATES, "configMap": {"name": cluster.certificates}})
                    mount = {"name": pods.CERTIFICATES, "mountPath": pods.CERTIFICATES_MOUNT, "readOnly": True}
                    container["volumeMounts"].append(mount)
    return objects


def _listed(folder: Path) -> list[Path]:
    """Return the files that a folder's Kustomization lists."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    return [folder / file for file in kustomization["resources"]]


def clusters() -> list[str]:
    """Return the platforms that have an overlay."""
    return [name for name in names("platform") if name not in (SHARED, LOCAL)]


def files() -> dict[Path, str]:
    """Return the contents of every generated file, by its path in ``manifests/``."""
    shared = load(chosen={"platform": SHARED})
    base = {
        "platform.yaml": cluster_objects.of(shared.platform, shared.cluster),
        "workflow.yaml": [workflow_template(shared)],
        "commands.yaml": store_commands.of(shared),
    }
    base["kustomization.yaml"] = [_kustomization([*WRITTEN, *base])]
    image = shared.platform.image_of("resolve")
    texts = {Path(file): IMAGE.sub(image, (MANIFESTS / file).read_text(encoding="utf-8")) for file in WITH_IMAGES}
    texts |= {Path("base") / file: MADE.format(SHARED) + as_text(contents) for file, contents in base.items()}
    texts[CLIENTS] = EXAMPLE_MADE + as_text(gateway.of(NAMESPACE, EXAMPLE, image=""))
    texts[BUDGETS] = EXAMPLE_MADE + as_text(gateway.budgets(NAMESPACE, EXAMPLE))
    for name in clusters():
        documents = documents_of(load(chosen={"platform": name}))
        overlay = _kustomization(["../../base"], list(_patches(documents_of(shared), documents)))
        texts[Path("overlays") / name / "kustomization.yaml"] = MADE.format(name) + as_text([overlay])
    return texts


def main() -> None:
    """Write the files in ``manifests/`` that follow from ``configs/``, and print the paths of those that changed."""
    for path, text in files().items():
        file = MANIFESTS / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
            print(file)


def _written(namespace: str, *files: Path, image: str = "") -> Iterator[Object]:
    for file in files:
        text = file.read_text(encoding="utf-8")
        for body in yaml.safe_load_all(IMAGE.sub(image, text) if image else text):
            yield _placed(body, namespace)


def _placed(body: Object, namespace: str) -> Object:
    """Move *body* from ``NAMESPACE`` to *namespace*, unless it belongs to no namespace or to another one."""
    metadata = body["metadata"]
    if body["kind"] == "Namespace":
        metadata["name"] = namespace
    if body["kind"] == "RoleBinding" and metadata["namespace"] != NAMESPACE:  # else the next one would replace it
        metadata["name"] = metadata["name"].removesuffix(NAMESPACE) + namespace
    for place in (metadata, *body.get("subjects", ())):
        if place.get("namespace") == NAMESPACE:
            place["namespace"] = namespace
    return body


def _patches(base: Iterable[Object], overlay: Iterable[Object]) -> Iterator[Object]:
    """Yield the Kustomize patches that turn *base* into *overlay*, one for each object that differs.

    Raises: ConfigError: they are not the same objects, for instance because the namespace differs.
    """
    bases, overlays = ({_identity(body): body for body in objects} for objects in (base, overlay))
    if bases.keys() != overlays.keys():
        odd = ", ".join(sorted("/".join(identity) for identity in bases.keys() ^ overlays.keys()))
        raise ConfigError(f"a platform can't add, leave out or rename objects: {odd}", hint=f"see {SHARED}.yaml")
    for (kind, namespace, name), body in bases.items():
        # Each operation on one line, so that people can read them.
        lines = [
            yaml.safe_dump(operation, default_flow_style=True, sort_keys=False, width=10**6)
            for operation in _changes(body, overlays[kind, namespace, name], "")
        ]
        if lines:
            yield {"target": {"kind": kind, "name": name}, "patch": "".join(f"- {line}" for line in lines)}


def _identity(body: Object) -> tuple[str, str, str]:
    metadata = body["metadata"]
    return body["kind"], metadata.get("namespace", ""), metadata["name"]


def _changes(old: Any, new: Any, path: str) -> Iterator[Object]:
    """Yield the operations of RFC 6902 that turn *old* into *new*. A list of another length is replaced as a whole."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            field = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in new:
                yield {"op": "remove", "path": field}
            elif key not in old:
                yield {"op": "add", "path": field, "value": new[key]}
            else:
                yield from _changes(old[key], new[key], field)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _changes(*pair, f"{path}/{index}")
    elif old != new:
        yield {"op": "replace", "path": path, "value": new}


def _kustomization(resources: list[str], patches: list[Object] | None = None) -> Object:
    body: Object = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources}
    return body | ({"patches": patches} if patches else {})


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def as_text(contents: Iterable[Object]) -> str:
    return yaml.dump_all(contents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    main()
