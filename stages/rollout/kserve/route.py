"""Mode ``route``, for any KServe in Standard mode: an InferenceService for each release behind the rollout's own
HTTPRoute, whose first backend is the stable release, and the second, if there is one, the canary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stages.parts.base.errors import ConfigError, Conflict
from stages.parts.cluster.kinds import SERVICES, Object
from stages.rollout.kserve import objects
from stages.rollout.kserve.applied import HTTP_ROUTES, lacking, shares
from stages.rollout.kserve.autoscaling import autoscalers
from stages.rollout.kserve.detect import as_configured
from stages.rollout.kserve.modes import Mode, add_copies
from stages.rollout.kserve.objects import ISVCS, KServeEndpoint, condition, predictor_name, revision_of
from stages.rollout.kserve.standard import NAMES
from stages.rollout.kserve.target import ServicePerReleaseTarget, check_reconciled

SERVICE_PORT: Final = 80


def route_name(endpoint: KServeEndpoint) -> str:
    """Name the rollout's HTTPRoute: never the name of one that KServe makes for an InferenceService."""
    return f"{endpoint.name}-route"


def service_name(endpoint: KServeEndpoint, release: str) -> str:
    """Name a release's InferenceService. KServe calls its Deployment ``<this>-predictor``, as no other mode's is
    called, and its host ``<this>-predictor-<namespace>``, which is one label of DNS."""
    suffix = f"-{predictor_name(release)}-route"
    room = objects.room_for_name(suffix, endpoint.namespace)
    if room < objects.LEAST_CHARACTERS:
        raise ConfigError(
            f"the namespace {endpoint.namespace} is too long for the host names that KServe makes of it",
            hint=f"one of at most {len(endpoint.namespace) + room - objects.LEAST_CHARACTERS} characters has room",
        )
    return objects.shortened(endpoint.name, room) + suffix


def deployment(endpoint: KServeEndpoint, release: str) -> str:
    """Name a release's Deployment and its Service."""
    return f"{service_name(endpoint, release)}-predictor"


def inference_service(endpoint: KServeEndpoint, release: str) -> Object:
    # The old name of the deployment mode, which every version understands.
    annotations = {objects.DEPLOYMENT_MODE: "RawDeployment"} | objects.autoscaler_class(endpoint)
    labels = {"networking.kserve.io/visibility": "cluster-local", objects.ENDPOINT: endpoint.name}
    spec, name = {"predictor": objects.predictor(endpoint, release)}, service_name(endpoint, release)
    return objects.manifest(ISVCS, endpoint, spec, name=name, labels=labels, annotations=annotations)


def http_route(endpoint: KServeEndpoint, gateway: str, hostname: str, weights: list[tuple[str, int, int]]) -> Object:
    """Build the route of clients to these (Service, port, percent), the stable release's first. The gateway answers 404
    for what it does not match."""
    backends = [
        {"group": "", "kind": "Service", "name": service, "port": port, "weight": percent}
        for service, port, percent in weights
    ]
    spec = objects.route_spec(endpoint, gateway, hostname, backends)
    annotations = {"slipway/mode": "route"}
    return objects.manifest(HTTP_ROUTES, endpoint, spec, name=route_name(endpoint), annotations=annotations)


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    deployments = {release: deployment(endpoint, release) for release in shares}
    weights = [(deployments[release], SERVICE_PORT, percent) for release, percent in shares.items()]
    installation = as_configured("route", endpoint.settings, {})
    hostname = installation.hostname(endpoint.name, endpoint.namespace)
    return [
        *(inference_service(endpoint, release) for release in shares),
        http_route(endpoint, installation.gateway, hostname, weights),
        objects.disruption_budget(endpoint),
        *autoscalers(endpoint, deployments),
    ]


class RouteTarget(ServicePerReleaseTarget):
    def regarding(self) -> Object | None:
        return self._route()

    def service_name(self, release: str) -> str:
        return service_name(self.endpoint, release)

    def deployment(self, release: str) -> str:
        return deployment(self.endpoint, release)

    def stable_of(self, services: Mapping[str, Object]) -> str | None:
        if (route := self._route()) is None:
            return None
        rules = route["spec"].get("rules", [])
        backends = [backend["name"] for backend in rules[0].get("backendRefs", [])] if len(rules) == 1 else []
        if not backends:  # it is not as the rollout made it
            raise Conflict(f"the route {route['metadata']['name']} was changed beyond its weights", hint="remove it")
        stable = next((release for release in services if self.deployment(release) == backends[0]), None)
        if stable is None:
            hint = "remove the route"
            raise Conflict(f"the route {route['metadata']['name']} leads to a Service of somebody else", hint=hint)
        return stable

    def route_of(self, service: Object) -> Object | None:  # noqa: ARG002
        return self._route()

    def backend_of(self, service: Object) -> str:
        return f"{service['metadata']['name']}-predictor"

    def deploy(self, release: str) -> None:
        stable = self.stable_of(self.clear_the_way(release))
        former = self.objects.ours(name=self.service_name(release))
        body = inference_service(self.endpoint, release)
        # Another autoscaler class would restart its pods.
        if former and former["metadata"]["annotations"].get(objects.AUTOSCALER) == "external":
            body["metadata"]["annotations"][objects.AUTOSCALER] = "external"
        applied = self.objects.apply(ISVCS, body, former)
        self.apply_companions(release, self.deployment(release), applied, canary=stable not in (None, release))

    def ready(self, release: str) -> bool:
        service = self.service(release)
        check_reconciled(service)
        revision = revision_of(service["spec"]["predictor"])
        return self.pods.ready(release, revision) and condition(service, "PredictorReady")

    def url(self, release: str) -> str:
        self.service(release)
        return self.objects.service_url(self.deployment(release))

    def make_stable(self, release: str) -> None:
        self.weigh({release: 100})

    def leave_host(self) -> None:
        if self._route():
            self.objects.remove(HTTP_ROUTES, route_name(self.endpoint))
            self.wait_for_propagation("", 0)

    def copy(self, release: str, percent: int) -> None:
        stable = self.stable_beside(release)
        body = self._route_with({stable: 100, release: 0})
        add_copies(body, percent)
        self.objects.apply(HTTP_ROUTES, body, self._route())
        shares = {self.deployment(stable): 100.0, self.deployment(release): 0.0}
        self.objects.wait_until(lambda: lacking(self._route(), shares), f"copies of {percent} % to {release}")
        self.wait_for_propagation("", 0)

    def request_shares(self, percent: Mapping[str, int], *, back: bool) -> None:
        self.objects.apply(HTTP_ROUTES, self._route_with(percent), self._route(), back=back)

    def _route_with(self, percent: Mapping[str, int]) -> Object:
        weights = [(self.deployment(release), self._port(release), part) for release, part in percent.items()]
        return http_route(self.endpoint, self.installation.gateway, self.hostname, weights)

    def requested_shares(self, services: Mapping[str, Object]) -> Mapping[str, float] | None:
        if (route := self._route()) is None:
            return None
        percent = shares(route)
        return {release: part for release in services if (part := percent.get(self.deployment(release)))}

    def _port(self, release: str) -> int:
        service = self.cluster.find(SERVICES, self.deployment(release))
        return int(service["spec"]["ports"][0]["port"]) if service else SERVICE_PORT

    def _route(self) -> Object | None:
        """Read the rollout's own route; raise Conflict if there is one of somebody else under its name."""
        return self.objects.ours(HTTP_ROUTES, route_name(self.endpoint))


MODE = Mode(
    name="route",
    target=RouteTarget,
    services=ISVCS,
    owns=lambda service: objects.ENDPOINT in service["metadata"].get("labels", {}),
    suits=lambda setup: setup.default_mode in NAMES,
    check=lambda setup: setup.cluster.require(HTTP_ROUTES),
    render=render,
    copies=True,
    movable=True,
)
