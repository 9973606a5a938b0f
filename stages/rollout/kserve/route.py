"""Any KServe in Standard mode: an InferenceService for each release, and the rollout's own HTTPRoute with the weights.

The route's first backend is the stable release, the second, if there is one, the canary.
"""

from __future__ import annotations

from stages.parts.base.errors import Conflict, TransientError
from stages.parts.releases.split import Split
from stages.rollout.kserve.http_route import HTTP_ROUTES, programmed, shares
from stages.rollout.kserve.kept import ISVCS, refuse_foreign
from stages.rollout.kserve.objects import (
    AUTOSCALER,
    ENDPOINT,
    MODEL,
    SAYS_MODE,
    Object,
    http_route,
    inference_service,
    predictor,
    route_name,
    route_service,
)
from stages.rollout.kserve.target import SERVICES, KServeTarget, check_reconciled, condition, release_of, revision_of


class RouteTarget(KServeTarget):
    def regarding(self) -> Object | None:
        return self._route()

    def serving(self, release: str) -> Object | None:
        return self.service(self._name(release))

    def split(self) -> Split:
        route = self._route()
        if route is None:
            return Split(None)
        releases = self._releases()
        stable = releases.get(self._backends(route)[0])
        others = [release for name, release in releases.items() if release != stable]
        canary = next((releases[name] for name in self._backends(route)[1:] if name in releases), None)
        canary = canary or (others[-1] if others else None)
        if canary is None:
            return Split(stable)
        if why := programmed(route):
            raise TransientError(f"the split in force is not certain: {why}")
        return Split(stable, canary, round(shares(route).get(self._deployment(canary), 0.0)))

    def deploy(self, release: str) -> None:
        others = set(self._releases().values()) - {release, self.split().stable}
        if others and self._route():
            raise Conflict(f"{min(others)} is being tried already", hint="end that rollout first")
        for other in others:  # left by a first rollout that was given up
            self._remove(other)
        seen = self.service(self._name(release))
        wanted = predictor(self.endpoint, release, "route")
        body = inference_service(self.endpoint, wanted, "route", name=self._name(release))
        if seen and seen["metadata"]["annotations"].get(AUTOSCALER) == "external":  # another one would restart its pods
            body["metadata"]["annotations"][AUTOSCALER] = "external"
        self.apply_companions(release, self._deployment(release), self.apply(ISVCS, body, seen))

    def ready(self, release: str) -> bool:
        found = self._service(release)
        check_reconciled(found)
        return self.pods.ready(release, revision_of(found["spec"]["predictor"])) and condition(found, "PredictorReady")

    def url(self, release: str) -> str:
        self._service(release)
        return self.service_url(self._deployment(release))

    def shift(self, release: str, percent: int) -> None:
        self._service(release)
        route = self._route()
        if route is None:
            raise Conflict(f"{self.endpoint.store.model} has no route", hint="start the rollout again")
        stable = self._stable(route)
        if stable == release:
            raise Conflict(f"{release} is the stable release", hint="start the rollout again")
        if shares(route).get(self._deployment(release)) != percent or programmed(route):
            self._split(route, [(stable, 100 - percent), (release, percent)])
        elif self.has_propagated(release, percent):
            return
        self.wait_for_propagation(release, percent)

    def promote(self, release: str) -> None:
        self._service(release)
        route = self._route()
        stable = self._stable(route) if route else None
        if stable not in (None, release):
            self.shift(release, 100)
            route = self._route()
        self._split(route, [(release, 100)])
        if stable is None:
            self.wait_for_propagation(release, 100)
        for each in set(self._releases().values()) - {release}:
            self._remove(each)
        self.apply_companions(release, self._deployment(release), self._service(release))

    def autoscaled(self, release: str) -> str:
        return self._deployment(release) if self.endpoint.settings.prometheus else ""

    def withdraw(self, release: str, *, first: bool = False) -> None:
        route = self._route()
        stable = self._stable(route) if route else None
        if stable == release:
            if not first or set(self._releases().values()) - {release}:
                raise self.refusal(release)
            if route:
                self.remove(HTTP_ROUTES, route["metadata"]["name"])
        elif stable:
            self._split(route, [(stable, 100)], back=True)
            self.wait_for_propagation(release, 0)
        self._remove(release)
        if not self._releases():
            self.remove_all()

    def client_url(self) -> str:
        return self.own_address()

    def leave_host(self) -> None:
        if route := self._route():
            self.remove(HTTP_ROUTES, route["metadata"]["name"])
            self.wait_for_propagation("", 0)

    def remove_services(self) -> None:
        for release in set(self._releases().values()):
            self._remove(release)

    def _split(self, seen: Object | None, parts: list[tuple[str, int]], *, back: bool = False) -> None:
        """Give each release its percentage, and wait until that is in force."""
        weights = [(self._deployment(release), self._port(release), percent) for release, percent in parts]
        hostname = self.installation.hostname(self.endpoint.name, self.endpoint.namespace)
        name = seen["metadata"]["name"] if seen else route_name(self.endpoint)
        body = http_route(self.endpoint, self.installation.gateway, hostname, weights, name=name)
        self.apply(HTTP_ROUTES, body, seen, back=back)

        def lacking() -> str:
            route = self._route()
            if route is None:
                return "the route is gone"
            if shares(route) != {name: float(percent) for name, _, percent in weights}:
                raise Conflict("somebody else changed the route", hint="start the rollout again")
            return programmed(route)

        self.wait_until(lacking, " and ".join(f"{percent} % for {release}" for release, percent in parts))

    def _port(self, release: str) -> int:
        found = self.get(SERVICES, self._deployment(release))
        return int(found["spec"]["ports"][0]["port"]) if found else 80

    def _service(self, release: str) -> Object:
        found = self.service(self._name(release))
        if found is None:
            raise Conflict(f"{release} is no longer on the platform", hint="start the rollout again")
        return found

    def _remove(self, release: str) -> None:
        self.remove_autoscaler(self._deployment(release))
        self.remove(ISVCS, self._name(release))

    def _releases(self) -> dict[str, str]:
        """The releases that have an InferenceService, by their Service's name; the oldest first."""
        found, _ = self.cluster.list(ISVCS, labels=f"{ENDPOINT}={self.endpoint.name}")
        found.sort(key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"]))
        named = ((each["metadata"]["name"], release_of(each["spec"]["predictor"])) for each in found)
        return {f"{name}-predictor": release for name, release in named if release}

    def _stable(self, route: Object) -> str:
        found = self._releases().get(self._backends(route)[0])
        if found is None:
            raise Conflict(
                f"the route {route['metadata']['name']} leads to a Service of somebody else", hint="remove the route"
            )
        return found

    def _backends(self, route: Object) -> list[str]:
        """Raises: Conflict: it is not the rollout's own route."""
        rules = route["spec"].get("rules", [])
        found = [each["name"] for each in rules[0].get("backendRefs", [])] if len(rules) == 1 else []
        if not found:
            raise Conflict(f"the route {route['metadata']['name']} was changed beyond its weights", hint="remove it")
        return found

    def _route(self) -> Object | None:
        """The rollout's own route; older versions gave it the endpoint's name.

        Raises:
            Conflict: another controller looks after it, or there is one of somebody else under its name.
        """
        for name in (self.endpoint.name, route_name(self.endpoint)):
            found = self.get(HTTP_ROUTES, name)
            if found and self._of_standard(found):
                continue
            ours = found and found["metadata"].get("annotations", {}).get(MODEL) == self.endpoint.store.model
            if found and ours:
                refuse_foreign(HTTP_ROUTES, found)
                return found
            if found and name != self.endpoint.name:
                raise Conflict(
                    f"the HTTPRoute {name} is not of {self.endpoint.store.model}", hint="remove or rename it"
                )
        return None

    def _of_standard(self, route: Object) -> bool:
        """Whether KServe made it for mode ``standard``, which a model is being moved from or to."""
        metadata = route["metadata"]
        owners = {(each["kind"], each["name"]) for each in metadata.get("ownerReferences", [])}
        return owners == {("InferenceService", metadata["name"])} and SAYS_MODE not in metadata.get("annotations", {})

    def _name(self, release: str) -> str:
        """The InferenceService of a release; older versions left out the end of its name."""
        there = {found: name.removesuffix("-predictor") for name, found in self._releases().items()}
        return there.get(release) or route_service(self.endpoint, release)

    def _deployment(self, release: str) -> str:
        return f"{self._name(release)}-predictor"
