"""The manifests of each platform: the workflow, its volume, locks, rights and limits.

``manifests/base`` is the platform ``cluster``: some files are written by hand, three are generated from
``configs/platforms/cluster.yaml``. ``manifests/overlays/<platform>`` holds only the differences, as patches generated
from ``configs/platforms/<platform>.yaml``. ``kubectl apply -k manifests/overlays/<platform>`` works without Slipway;
``documents`` returns the same objects without kubectl.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from pipeline.cluster import gateway, store_commands
from pipeline.cluster import objects as cluster_objects
from pipeline.settings.config import RunConfig, load, names
from pipeline.settings.platform import Clients, ClusterSettings, Platform
from pipeline.workflow import pods
from pipeline.workflow.definition import workflow_template
from stages.parts.base.errors import ConfigError
from stages.parts.base.store import write_text

MANIFESTS: Final = Path(__file__).parents[2] / "manifests"
SHARED: Final = "cluster"
"""The platform that the others extend."""
WRITTEN: Final = ("namespace.yaml", "accounts.yaml", "network.yaml", "nightly.yaml")
"""Files of ``manifests/base`` that are written by hand. Their namespace is ``NAMESPACE``."""
TRIGGERS: Final = {"events": "events", "poll": "events/poll"}
"""The folders of what starts runs, by the names that ``slipway render`` takes."""
WITH_IMAGES: Final = ("events/receiver.yaml", "events/poll/poll.yaml")
"""Written by hand, but for the images: these are the platform's, so that a registry is named in one place."""
IMAGE: Final = re.compile(r"(?<=image: )\S*/slipway-slim:\S+")
NAMESPACE: Final = "slipway"
CLIENTS: Final = Path("envoy-gateway/clients/gateway.yaml")
EXAMPLE: Final = Clients(
    file=str(MANIFESTS / CLIENTS.with_name("clients.yaml")),
    hosts=("*.example.com",),
    issuer="letsencrypt",
    prometheus="monitoring",
)
"""What the example in ``CLIENTS`` is rendered with."""
EXAMPLE_MADE: Final = (
    "# Made from clients.yaml by: make manifests. An example: slipway install applies your platform's.\n"
)
MADE: Final = "# Made from configs/platforms/{}.yaml by: make manifests\n"

Document = dict[str, Any]


def documents(platform: str) -> list[Document]:
    """All objects of a platform's cluster, in an order in which they can be applied.

    Raises:
        UnknownName, ConfigError: there is no such platform, or it is not a cluster.
    """
    return documents_of(load(chosen={"platform": platform}))


def documents_of(config: RunConfig) -> list[Document]:
    """All objects of a configuration's platform, as ``documents``.

    Raises:
        ConfigError: its platform is not a cluster.
    """
    platform = config.platform
    cluster = _cluster(platform)
    found = [
        *_written(platform.namespace, *(MANIFESTS / "base" / file for file in WRITTEN)),
        *cluster_objects.of(platform, cluster),
        workflow_template(config),
        *store_commands.of(config),
    ]
    own = gateway.of(platform.namespace, cluster.clients) if cluster.clients else []
    return list({_identity(each): each for each in (*found, *own)}.values())


def _cluster(platform: Platform) -> ClusterSettings:
    if platform.cluster is None:
        raise ConfigError(
            f"the platform {platform.name!r} is one machine: nothing is applied to it",
            hint=f"choose one of: {', '.join(clusters())}",
        )
    return platform.cluster


def for_kserve(namespace: str) -> list[Document]:
    """The objects that rollouts need where KServe is: ``manifests/kserve``, for a pipeline in *namespace*."""
    folder = MANIFESTS / "kserve"
    files = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    return list(_written(namespace, *(folder / file for file in files)))


def for_triggers(which: str, platform: Platform) -> list[Document]:
    """The objects that start runs, with the namespace, the image and the variables of *platform*.

    Args:
        which: a key of ``TRIGGERS``.

    Raises:
        ConfigError: *platform* is one machine.
    """
    cluster = _cluster(platform)
    folder = MANIFESTS / TRIGGERS[which]
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    found = list(_written(platform.namespace, *(folder / file for file in listed), image=platform.image_of("resolve")))
    for document in found:
        spec = document.get("spec", {})
        for each in spec.get("templates", []):
            if "container" in each:
                _complete(each["container"], spec, cluster)
    return found


def _complete(container: Document, spec: Document, cluster: ClusterSettings) -> None:
    """Give a container that asks the Hub the variables and certificates that stages get."""
    trusted = pods.TRUSTED if cluster.certificates else {}
    container["env"] += [{"name": name, "value": value} for name, value in (trusted | cluster.environment).items()]
    if cluster.certificates:
        spec["volumes"].append({"name": pods.CERTIFICATES, "configMap": {"name": cluster.certificates}})
        mount = {"name": pods.CERTIFICATES, "mountPath": pods.CERTIFICATES_MOUNT, "readOnly": True}
        container["volumeMounts"].append(mount)


def clusters() -> list[str]:
    """The platforms that have an overlay."""
    return [name for name in names("platform") if name not in (SHARED, "local")]


def files() -> dict[Path, str]:
    """The contents of every generated file, by its path in ``manifests/``."""
    shared = load(chosen={"platform": SHARED})
    objects = cluster_objects.of(shared.platform, shared.platform.cluster) if shared.platform.cluster else []
    base = {
        "platform.yaml": objects,
        "workflow.yaml": [workflow_template(shared)],
        "commands.yaml": store_commands.of(shared),
    }
    base["kustomization.yaml"] = [_kustomization([*WRITTEN, *base])]
    image = shared.platform.image_of("resolve")
    made = {Path(file): IMAGE.sub(image, (MANIFESTS / file).read_text(encoding="utf-8")) for file in WITH_IMAGES}
    made |= {Path("base") / file: MADE.format(SHARED) + as_text(contents) for file, contents in base.items()}
    made[CLIENTS] = EXAMPLE_MADE + as_text(gateway.of(NAMESPACE, EXAMPLE))
    for name in clusters():
        overlay = _kustomization(["../../base"], list(_patches(documents(SHARED), documents(name))))
        made[Path("overlays") / name / "kustomization.yaml"] = MADE.format(name) + as_text([overlay])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.cluster.manifests",
        description="Write the files in manifests/ that follow from configs/.",
        epilog="example: python -m pipeline.cluster.manifests",
    )
    parser.parse_args()
    for path, text in files().items():
        file = MANIFESTS / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
            print(file)


def _written(namespace: str, *files: Path, image: str = "") -> Iterator[Document]:
    for file in files:
        text = file.read_text(encoding="utf-8")
        for document in yaml.safe_load_all(IMAGE.sub(image, text) if image else text):
            yield _placed(document, namespace)


def _placed(document: Document, namespace: str) -> Document:
    """Move *document* from ``NAMESPACE`` to *namespace*, unless it belongs to no namespace or to another one."""
    metadata = document["metadata"]
    if document["kind"] == "Namespace":
        metadata["name"] = namespace
    if document["kind"] == "RoleBinding" and metadata["namespace"] != NAMESPACE:  # else the next one would replace it
        metadata["name"] = metadata["name"].removesuffix(NAMESPACE) + namespace
    for place in (metadata, *document.get("subjects", ())):
        if place.get("namespace") == NAMESPACE:
            place["namespace"] = namespace
    return document


def _patches(base: Iterable[Document], other: Iterable[Document]) -> Iterator[Document]:
    """The Kustomize patches that turn *base* into *other*, one for each document that differs.

    Raises:
        ConfigError: they are not the same objects, for instance because the namespace differs.
    """
    wanted = {_identity(each): each for each in other}
    known = {_identity(each): each for each in base}
    if wanted.keys() != known.keys():
        odd = ", ".join(sorted("/".join(each) for each in wanted.keys() ^ known.keys()))
        raise ConfigError(f"a platform can't add, leave out or rename objects: {odd}", hint=f"see {SHARED}.yaml")
    for (kind, _, name), before in known.items():
        operations = list(_changes(before, wanted[kind, _, name], ""))
        if operations:
            yield {"target": {"kind": kind, "name": name}, "patch": _operations(operations)}


def _identity(document: Document) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return document["kind"], metadata.get("namespace", ""), metadata["name"]


def _changes(before: Any, after: Any, path: str) -> Iterator[Document]:
    """The operations of RFC 6902 that turn *before* into *after*. A list of another length is replaced as a whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in after:
                yield {"op": "remove", "path": place}
            elif key not in before:
                yield {"op": "add", "path": place, "value": after[key]}
            else:
                yield from _changes(before[key], after[key], place)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, another) in enumerate(zip(before, after, strict=True)):
            yield from _changes(one, another, f"{path}/{index}")
    elif before != after:
        yield {"op": "replace", "path": path, "value": after}


def _operations(operations: list[Document]) -> str:
    """Write each operation on one line, so that people can read them."""
    lines = (
        yaml.safe_dump(operation, default_flow_style=True, sort_keys=False, width=10**6) for operation in operations
    )
    return "".join(f"- {line}" for line in lines)


def _kustomization(resources: list[str], patches: list[Document] | None = None) -> Document:
    made: Document = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources}
    return made | ({"patches": patches} if patches else {})


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def as_text(contents: Iterable[Document]) -> str:
    return yaml.dump_all(contents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    main()
