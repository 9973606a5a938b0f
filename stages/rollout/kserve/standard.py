"""Mode ``standard``, KServe 0.21 or newer: one InferenceService with its canary in ``spec.canary``, and weights in
KServe's own route.

``status.canaryStatuses`` repeats the percentage that was requested; only the HTTPRoute shows what is in force. When a
canary is removed, KServe deletes its Deployment before it changes the route: its share is therefore set to 0 first.

While there is a canary, KServe gives the stable release its ``minReplicas`` less the canary's, and at least one. The
rollout therefore adds the canary's for that time: the stable release keeps what it has, and can take all traffic back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from stages.parts.base.errors import AccessDenied, ConfigError, Conflict
from stages.parts.cluster.api import Absent
from stages.parts.cluster.kinds import DEFINITIONS, Object
from stages.parts.releases.release import Split
from stages.rollout.kserve import objects
from stages.rollout.kserve.applied import lacking, share
from stages.rollout.kserve.autoscaling import autoscalers
from stages.rollout.kserve.detect import CONFIG, CRD, NAMESPACE, SET_MODE, Installation, Setup, as_configured
from stages.rollout.kserve.modes import Mode
from stages.rollout.kserve.objects import ISVCS, KServeEndpoint, condition, predictor_name, release_of, revision_of
from stages.rollout.kserve.target import AGAIN, OneServiceTarget, check_reconciled
from stages.rollout.target import needed, tried_already

NAMES: Final = ("Standard", "RawDeployment")
"""KServe's deployment mode, by its new name and its old one. Versions with ``spec.canary`` need the new one."""
ONLY_ON_STABLE: Final = ("maxReplicas", "scaleMetric", "scaleTarget", "containerConcurrency", "timeout")
"""Fields that KServe refuses on a canary, or takes from the stable predictor."""
CANARY_SINCE: Final = (0, 21)
"""The first version whose canaries work: 0.20 has ``spec.canary``, but neither routes by it nor waits for readiness."""


def suits(setup: Setup) -> bool:
    """Whether KServe is in this mode and splits traffic in it; raise ConfigError if it may be 0.20."""
    if setup.default_mode not in NAMES or not _has_canaries(setup):
        return False
    if setup.version is None:
        raise ConfigError("KServe's version can't be read, and 0.20 ignores a canary's share", hint=SET_MODE)
    return True


def check(setup: Setup) -> None:
    if not _has_canaries(setup):
        version = "{}.{}".format(*setup.version) if setup.version else "without spec.canary"
        text = f"KServe {version} does not split traffic in Standard mode: 0.21 is the first that does"
        raise ConfigError(text, hint="upgrade KServe, or set kserve.mode to route")
    if setup.config and not setup.ingress.get("enableGatewayApi", False):
        raise ConfigError(
            f"KServe is in Standard mode without the Gateway API (ingress.enableGatewayApi in {NAMESPACE}/{CONFIG} is "
            "false): a canary would get no traffic",  # KServe starts its pods all the same
            hint="set it to true and restart KServe's controller, or set kserve.mode to route",
        )
    if setup.ingress.get("disableIngressCreation", False):
        raise ConfigError(
            f"KServe creates no routes (ingress.disableIngressCreation in {NAMESPACE}/{CONFIG} is true): "
            "traffic can't be split",
            hint="set it to false and restart KServe's controller, or set kserve.mode to route",
        )
    shortest = "m" * objects.LEAST_CHARACTERS + f"-{objects.LONGEST_PREDICTOR}-predictor"
    check_hostname(as_configured("standard", setup.settings, setup.ingress), shortest, setup.cluster.namespace)


def check_hostname(installation: Installation, deployment: str, namespace: str) -> None:
    """Raise ConfigError if KServe can't make a host name of a release's Deployment."""
    hostname, most = installation.hostname(deployment, namespace), objects.LABEL_CHARACTERS
    if max(map(len, hostname.split("."))) > most:
        raise ConfigError(
            f"KServe would make the host name {hostname}, with more than {most} characters in a row",
            hint="a namespace with a shorter name, or a domainTemplate with a dot before {{ .Namespace }}",
        )


def _has_canaries(setup: Setup) -> bool:
    """Whether canaries work, by KServe's version or, if that is not known, by its definition. True if neither can be
    read: then the mode was set."""
    if setup.version is not None:
        return setup.version >= CANARY_SINCE
    try:
        versions = setup.cluster.get(DEFINITIONS, CRD)["spec"]["versions"]
    except (Absent, AccessDenied):
        return True
    schemas = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1beta1"]
    return any("canary" in schema["properties"]["spec"]["properties"] for schema in schemas)


def predictor(endpoint: KServeEndpoint, release: str) -> Object:
    return objects.predictor(endpoint, release) | {"name": predictor_name(release)}


def canary(stable: Object, percent: int) -> Object:
    """Build an entry of ``spec.canary``, made from its release's ``predictor``."""
    fields = {key: value for key, value in stable.items() if key not in ONLY_ON_STABLE}
    return {"trafficPercent": percent, "predictor": fields}


def replicas(predictor: Object) -> int:
    return int(predictor.get("minReplicas", 1))


def with_replicas(predictor: Object, more: int) -> Object:
    """Add *more* replicas to a predictor."""
    bounds = [key for key in ("minReplicas", "maxReplicas") if key in predictor]
    return predictor | {key: max(1, int(predictor[key]) + more) for key in bounds}


def inference_service(endpoint: KServeEndpoint, stable: Object, canaries: Sequence[Object] = ()) -> Object:
    annotations = {objects.DEPLOYMENT_MODE: NAMES[0]} | objects.autoscaler_class(endpoint)
    return objects.manifest(ISVCS, endpoint, {"predictor": stable, "canary": list(canaries)}, annotations=annotations)


def deployment(endpoint: KServeEndpoint, predictor: Object) -> str:
    """Name a predictor's Deployment and its Service."""
    return f"{endpoint.name}-{predictor['name']}-predictor"


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    predictors = {release: predictor(endpoint, release) for release in shares}
    first, *tried = shares
    canaries = [canary(predictors[release], shares[release]) for release in tried]
    stable = with_replicas(predictors[first], sum(replicas(predictors[release]) for release in tried))
    deployments = {release: deployment(endpoint, served) for release, served in predictors.items()}
    return [
        inference_service(endpoint, stable, canaries),
        objects.disruption_budget(endpoint),
        *autoscalers(endpoint, deployments),
    ]


class StandardTarget(OneServiceTarget):
    def split(self) -> Split:
        service = self.objects.ours()
        entry = self._canary(service) if service else None
        if service is None or (entry is None and self._route() is None):
            return Split(None)  # KServe creates the route once the first release is ready
        stable = release_of(service["spec"]["predictor"])
        if entry is None:
            return Split(stable)
        percent = share(self._route(), deployment(self.endpoint, entry["predictor"]))
        return Split(stable, release_of(entry["predictor"]), percent)

    def deploy(self, release: str) -> None:
        service, route = self.objects.ours(), self._route()
        new = predictor(self.endpoint, release)
        stable = service["spec"]["predictor"] if service else {}
        alone = service is None or route is None or release_of(stable) == release
        if service is None or alone:
            canaries = service["spec"].get("canary") or [] if service and route else []
            applied = self.objects.apply(ISVCS, inference_service(self.endpoint, new, canaries), service)
        else:
            entry = self._canary(service)
            if entry and (canary_release := release_of(entry["predictor"])) != release:
                raise tried_already(canary_release)
            if entry is None:
                stable = with_replicas(stable, replicas(new))
            applied = self._apply(service, stable, [canary(new, entry["trafficPercent"] if entry else 0)])
        self.apply_companions(release, deployment(self.endpoint, new), applied, canary=not alone)

    def check_room(self, release: str) -> None:
        """See ``Target``; there must be room in the release's host name, too."""
        name = deployment(self.endpoint, {"name": predictor_name(release)})
        check_hostname(self.installation, name, self.endpoint.namespace)
        super().check_room(release)

    def ready(self, release: str) -> bool:
        """Tell whether both KServe and the pods report so. KServe's report changes while a model loads, and may be
        about an older revision."""
        service = self.service()
        check_reconciled(service)
        served = self._predictor(service, release)
        if not self.pods.ready(release, revision_of(served)):
            return False
        if release_of(service["spec"]["predictor"]) == release:
            return condition(service, "PredictorReady")
        statuses = service.get("status", {}).get("canaryStatuses", [])
        return any(status["name"] == served["name"] and status["ready"] for status in statuses)

    def url(self, release: str) -> str:
        return self.objects.service_url(self.deployment(release))

    def deployment(self, release: str) -> str:
        return deployment(self.endpoint, self._predictor(self.service(), release))

    def shift(self, release: str, percent: int, *, back: bool = False) -> None:
        service = self.service()
        entry = self._canary_serving(service, release)
        if entry["trafficPercent"] != percent:
            self._apply(service, service["spec"]["predictor"], [canary(entry["predictor"], percent)], back=back)
        elif self.has_propagated(release, percent) and not self._lacking(entry["predictor"], percent):
            return
        self._wait(entry["predictor"], percent)
        self.wait_for_propagation(release, percent)

    def promote(self, release: str) -> None:
        service = self.service()
        stable = service["spec"]["predictor"]
        if release_of(stable) != release:
            self.shift(release, 100)
            service = self.service()
            entry = self._canary_serving(service, release)
            # Its name and every field of its pods stay, so that no pod is restarted.
            alone = with_replicas(stable, -replicas(entry["predictor"]))
            bounds = {key: alone[key] for key in ("minReplicas", "maxReplicas", "timeout") if key in alone}
            service = self._apply(service, entry["predictor"] | bounds, [])
            stable = entry["predictor"]
        else:  # the first one
            self._wait(stable, 100)
            self.wait_for_propagation(release, 100)
        self._remove_stale_autoscalers(service)
        self.apply_companions(release, deployment(self.endpoint, stable), service)
        self._wait(stable, 100)

    def withdraw(self, release: str, *, first: bool = False) -> None:
        service = self.objects.ours()
        if service is None or release_of(service["spec"]["predictor"]) == release:
            if first and not (service and self._canary(service)):
                self.autoscalers.keep()
                self.remove_all()
            elif service:
                raise needed(self.endpoint.store, release)
            return
        entry = self._canary(service)
        if entry and release_of(entry["predictor"]) == release:
            self.shift(release, 0, back=True)
            service = self.service()
            alone = with_replicas(service["spec"]["predictor"], -replicas(entry["predictor"]))
            service = self._apply(service, alone, [], back=True)
        self._remove_stale_autoscalers(service)

    def remove_services(self) -> None:
        if service := self.objects.ours():
            self.autoscalers.remove(deployment(self.endpoint, service["spec"]["predictor"]))
        super().remove_services()

    def _apply(self, former: Object, stable: Object, canaries: Sequence[Object], *, back: bool = False) -> Object:
        """Change what was read. The autoscaler class stays: another one would restart the stable release's pods."""
        body = inference_service(self.endpoint, stable, canaries)
        annotations = former["metadata"]["annotations"]
        body["metadata"]["annotations"][objects.AUTOSCALER] = annotations.get(objects.AUTOSCALER, "external")
        return self.objects.apply(ISVCS, body, former, back=back)

    def _remove_stale_autoscalers(self, service: Object) -> None:
        """Remove the autoscalers of Deployments that the InferenceService no longer has."""
        self.autoscalers.keep(*(deployment(self.endpoint, served) for served in _predictors(service)))

    def _route(self) -> Object | None:
        return self.objects.route_by_kserve(self.endpoint.name, ISVCS.name, self.endpoint.name)

    def _canary(self, service: Object) -> Object | None:
        """Find the canary; raise Conflict if there are several: the rollout itself makes only one."""
        canaries = service["spec"].get("canary") or []
        if len(canaries) > 1:
            hint = "remove the others"
            raise Conflict(f"{self.endpoint.name} has {len(canaries)} canaries, some of somebody else", hint=hint)
        return canaries[0] if canaries else None

    def _canary_serving(self, service: Object, release: str) -> Object:
        entry = self._canary(service)
        if entry is None or release_of(entry["predictor"]) != release:
            raise Conflict(f"{release} is not the canary", hint="deploy it first")
        return entry

    def _predictor(self, service: Object, release: str) -> Object:
        for served in _predictors(service):
            if release_of(served) == release:
                return served
        raise Conflict(f"{release} is no longer on the platform", hint=AGAIN)

    def _lacking(self, served: Object, percent: int) -> str:
        return lacking(self._route(), {deployment(self.endpoint, served): percent})

    def _wait(self, served: Object, percent: int) -> None:
        """Wait until a predictor's percentage is in force."""
        release = release_of(served)

        def unfinished() -> str:
            if _requested_share(self.service(), release) != percent:
                raise Conflict(f"somebody else changed the share of {release}", hint=AGAIN)
            return self._lacking(served, percent)

        self.objects.wait_until(unfinished, f"{percent} % for {release}")


def _predictors(service: Object) -> list[Object]:
    """List the predictors, the stable release's first."""
    return [service["spec"]["predictor"], *(entry["predictor"] for entry in service["spec"].get("canary") or [])]


def _requested_share(service: Object, release: str | None) -> int | None:
    """Read the percentage that was requested for a release, if it is there."""
    canaries = service["spec"].get("canary") or []
    shares = {release_of(entry["predictor"]): int(entry["trafficPercent"]) for entry in canaries}
    shares.setdefault(release_of(service["spec"]["predictor"]), 100 - sum(shares.values()))
    return shares.get(release)


MODE = Mode(
    name="standard",
    target=StandardTarget,
    services=ISVCS,
    owns=lambda service: (
        service["metadata"].get("annotations", {}).get(objects.DEPLOYMENT_MODE) in NAMES
        and objects.ENDPOINT not in service["metadata"].get("labels", {})
    ),
    suits=suits,
    check=check,
    render=render,
    movable=True,
)
