"""Standard mode, KServe 0.21 or newer: one InferenceService, the canary in ``spec.canary``, weights in KServe's route.

``status.canaryStatuses`` repeats the percentage that was requested; only the HTTPRoute shows what is in force. When a
canary is removed, KServe deletes its Deployment before it changes the route: its share is therefore set to 0 first.

While there is a canary, KServe gives the stable release its ``minReplicas`` less the canary's, and at least one. The
rollout therefore adds the canary's for that time: the stable release keeps what it has, and can take all traffic back.
"""

from __future__ import annotations

from typing import Final

from stages.parts.base.errors import Conflict, TransientError
from stages.parts.releases.split import Split
from stages.rollout.kserve.detect import check_hostname
from stages.rollout.kserve.http_route import programmed, shares
from stages.rollout.kserve.kept import ISVCS
from stages.rollout.kserve.objects import (
    AUTOSCALER,
    Object,
    canary,
    inference_service,
    predictor,
    predictor_name,
    replicas,
    with_replicas,
)
from stages.rollout.kserve.target import KServeTarget, check_reconciled, condition, release_of, revision_of, url_of

AGAIN: Final = "start the rollout again"


class StandardTarget(KServeTarget):
    def split(self) -> Split:
        found = self.service()
        other = self._canary(found) if found else None
        if found is None or (other is None and self._route() is None):
            return Split(None)  # KServe creates the route once the first release is ready
        stable = release_of(found["spec"]["predictor"])
        if other is None:
            return Split(stable)
        share, why = self._share(other["predictor"])
        if share is None:
            raise TransientError(f"the split in force is not certain: {why}")
        return Split(stable, release_of(other["predictor"]), round(share))

    def deploy(self, release: str) -> None:
        found, route = self.service(), self._route()
        wanted = predictor(self.endpoint, release, "standard")
        served = found is not None and route is not None
        stable = found["spec"]["predictor"] if found else None
        if found is None or stable is None or not served or release_of(stable) == release:
            others = found["spec"].get("canary") or [] if found and served else []
            applied = self._apply(found, wanted, others, anew=True)
        else:
            other = self._canary(found)
            if other and release_of(other["predictor"]) != release:
                raise Conflict(
                    f"{release_of(other['predictor'])} is being tried already", hint="end that rollout first"
                )
            if other is None:
                stable = with_replicas(stable, replicas(wanted))
            applied = self._apply(found, stable, [canary(wanted, other["trafficPercent"] if other else 0)])
        self._apply_companions(release, applied, wanted)

    def check_room(self, release: str) -> None:
        """Also in the release's host name: another mode, which needs less, may have named the endpoint."""
        deployment = self._deployment({"name": predictor_name(release)})
        check_hostname(self.installation, deployment, self.endpoint.namespace)
        super().check_room(release)

    def ready(self, release: str) -> bool:
        """What both KServe and the pods report. KServe's report changes while a model loads, and may be about an older
        revision."""
        found = self._service()
        check_reconciled(found)
        if not self.pods.ready(release, revision_of(self._predictor(found, release))):
            return False
        if release_of(found["spec"]["predictor"]) == release:
            return condition(found, "PredictorReady")
        name = self._predictor(found, release)["name"]
        return any(each["name"] == name and each["ready"] for each in found.get("status", {}).get("canaryStatuses", []))

    def url(self, release: str) -> str:
        return self.service_url(self._deployment(self._predictor(self._service(), release)))

    def shift(self, release: str, percent: int) -> None:
        self._set_share(release, percent)

    def _set_share(self, release: str, percent: int, *, back: bool = False) -> None:
        found = self._service()
        other = self._canary(found)
        if other is None or release_of(other["predictor"]) != release:
            raise Conflict(f"{release} is not the canary", hint="deploy it first")
        if other["trafficPercent"] != percent:
            self._apply(found, found["spec"]["predictor"], [canary(other["predictor"], percent)], back=back)
        elif self.has_propagated(release, percent) and self._share(other["predictor"]) == (percent, ""):
            return
        self._wait(other["predictor"], percent)
        self.wait_for_propagation(release, percent)

    def promote(self, release: str) -> None:
        found = self._service()
        stable = found["spec"]["predictor"]
        if release_of(stable) != release:
            self.shift(release, 100)
            found = self._service()
            other = self._canary(found)
            if other is None or release_of(other["predictor"]) != release:
                raise Conflict(f"{release} was taken away meanwhile", hint=AGAIN)
            # Its name and every field of its pods stay, so that no pod is restarted.
            alone = with_replicas(stable, -replicas(other["predictor"]))
            kept = {key: alone[key] for key in ("minReplicas", "maxReplicas", "timeout") if key in alone}
            found = self._apply(found, other["predictor"] | kept, [])
            stable = other["predictor"]
        else:  # the first one
            self._wait(stable, 100)
            self.wait_for_propagation(release, 100)
        self._remove_stale_autoscalers(found)
        self._apply_companions(release, found, stable)
        self._wait(stable, 100)

    def autoscaled(self, release: str) -> str:
        if not self.endpoint.settings.prometheus:
            return ""
        return self._deployment(self._predictor(self._service(), release))

    def withdraw(self, release: str, *, first: bool = False) -> None:
        found = self.service()
        if found is None or release_of(found["spec"]["predictor"]) == release:
            if first and not (found and self._canary(found)):
                self.keep_autoscalers()
                self.remove_all()
            elif found:
                raise self.refusal(release)
            return
        other = self._canary(found)
        if other and release_of(other["predictor"]) == release:
            self._set_share(release, 0, back=True)
            found = self._service()
            alone = with_replicas(found["spec"]["predictor"], -replicas(other["predictor"]))
            found = self._apply(found, alone, [], back=True)
        self._remove_stale_autoscalers(found)

    def client_url(self) -> str:
        return url_of(self.service(), self.endpoint.store.model)

    def remove_services(self) -> None:
        if found := self.service():
            self.remove_autoscaler(self._deployment(found["spec"]["predictor"]))
        super().remove_services()

    def _apply(
        self, seen: Object | None, stable: Object, others: list[Object], *, anew: bool = False, back: bool = False
    ) -> Object:
        body = inference_service(self.endpoint, stable, "standard", canaries=others)
        if seen and not anew:  # another autoscaler class would restart the stable release's pods
            body["metadata"]["annotations"] |= {AUTOSCALER: seen["metadata"]["annotations"].get(AUTOSCALER, "external")}
        return self.apply(ISVCS, body, seen, back=back)

    def _apply_companions(self, release: str, service: Object, predictor: Object) -> None:
        self.apply_companions(release, self._deployment(predictor), service)

    def _remove_stale_autoscalers(self, service: Object) -> None:
        """Remove the autoscalers of Deployments that the InferenceService no longer has."""
        if self.endpoint.settings.prometheus:
            there = [service["spec"]["predictor"], *(each["predictor"] for each in service["spec"].get("canary") or [])]
            self.keep_autoscalers(*map(self._deployment, there))

    def _route(self) -> Object | None:
        """KServe's route.

        Raises:
            Conflict: there is one of somebody else under its name, or what mode ``route`` left.
        """
        return self.made_by_kserve(self.endpoint.name, ISVCS.name, self.endpoint.name)

    def _service(self) -> Object:
        found = self.service()
        if found is None:
            raise Conflict(f"{self.endpoint.store.model} is not being served", hint=AGAIN)
        return found

    def _canary(self, service: Object) -> Object | None:
        """Raises: Conflict: there are several: the rollout itself makes only one."""
        found = service["spec"].get("canary") or []
        if len(found) > 1:
            raise Conflict(
                f"{self.endpoint.name} has {len(found)} canaries, some of somebody else", hint="remove the others"
            )
        return found[0] if found else None

    def _predictor(self, service: Object, release: str) -> Object:
        canaries = [each["predictor"] for each in service["spec"].get("canary") or []]
        for each in (service["spec"]["predictor"], *canaries):
            if release_of(each) == release:
                return dict(each)
        raise Conflict(f"{release} is no longer on the platform", hint=AGAIN)

    def _deployment(self, predictor: Object) -> str:
        """The name of its Deployment and of its Service."""
        name = predictor.get("name")
        return f"{self.endpoint.name}-{name}-predictor" if name else f"{self.endpoint.name}-predictor"

    def _share(self, predictor: Object) -> tuple[float | None, str]:
        """The percentage of clients' requests that *predictor* gets; None and the reason if that is not certain."""
        route = self._route()
        if route is None:
            return None, "KServe has not created its route"
        if why := programmed(route):
            return None, why
        found = shares(route)
        return (found.get(self._deployment(predictor), 0.0), "") if found else (None, "its rules split differently")

    def _wait(self, predictor: Object, percent: int) -> None:
        def lacking() -> str:
            found = self._service()
            if _requested_share(found, release_of(predictor)) != percent:
                raise Conflict(f"somebody else changed the share of {release_of(predictor)}", hint=AGAIN)
            share, why = self._share(predictor)
            return why or ("" if share == percent else f"the route gives it {share:g} %")

        self.wait_until(lacking, f"{percent} % for {release_of(predictor)}")


def _requested_share(service: Object, release: str | None) -> int | None:
    """The percentage that was requested for a release; None if it is not there."""
    canaries = service["spec"].get("canary") or []
    for each in canaries:
        if release_of(each["predictor"]) == release:
            return int(each["trafficPercent"])
    if release_of(service["spec"]["predictor"]) != release:
        return None
    return 100 - sum(int(each["trafficPercent"]) for each in canaries)
