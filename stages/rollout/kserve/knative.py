"""Mode ``knative``: one InferenceService, whose latest revision gets ``canaryTrafficPercent``, and the previous one the
rest.

A new template is a new revision. A revision's labels say what it serves; ``status.components.predictor.traffic`` says
which share it gets. At 100 % Knative removes the pods of the previous revision at once. The last step therefore gives
99 %, so that a rollback takes seconds, and promoting gives the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from stages.parts.base.errors import Conflict, ServerFailed, TransientError
from stages.parts.base.log import say
from stages.parts.cluster.kinds import Kind, Object
from stages.parts.releases.release import Split
from stages.parts.vllm.sizing import START_S
from stages.rollout.kserve import objects
from stages.rollout.kserve.applied import POLL_S
from stages.rollout.kserve.modes import Mode
from stages.rollout.kserve.objects import ISVCS, KServeEndpoint, condition, release_of, revision_of
from stages.rollout.kserve.scaling_targets import cold_start_of, concurrency_of
from stages.rollout.kserve.target import AGAIN, OneServiceTarget
from stages.rollout.target import Replicas, needed, tried_already

NAMES: Final = ("Serverless", "Knative")
"""KServe's deployment mode, by its old name, which every version understands, and its new one."""
PERCENT: Final = "canaryTrafficPercent"
NEARLY_ALL: Final = 99
REVISIONS: Final = Kind("serving.knative.dev/v1", "Revision", "revisions")


def predictor(endpoint: KServeEndpoint, release: str) -> Object:
    scaling, concurrency = endpoint.settings.scaling, concurrency_of(endpoint, release)
    common = objects.predictor(endpoint, release, drained=False)
    return common | {
        "timeout": min(endpoint.settings.timeout_s, 600),  # Knative's maximum
        "scaleMetric": "concurrency",
        "scaleTarget": concurrency,
        "minReplicas": scaling.minimum,
        "annotations": common.get("annotations", {})
        | {
            "autoscaling.knative.dev/window": f"{max(6, scaling.scale_up_window_s)}s",  # Knative's minimum
            "autoscaling.knative.dev/scale-down-delay": f"{scaling.scale_down_delay_s}s",
            "autoscaling.knative.dev/target-utilization-percentage": "100",
            "autoscaling.knative.dev/initial-scale": str(max(1, scaling.minimum)),
            "serving.knative.dev/progress-deadline": f"{endpoint.serving_of(release).startup_timeout_s + START_S}s",
        },
    }


def inference_service(endpoint: KServeEndpoint, predictor: Object) -> Object:
    annotations = {objects.DEPLOYMENT_MODE: NAMES[0], "serving.kserve.io/enable-tag-routing": "true"}
    return objects.manifest(ISVCS, endpoint, {"predictor": predictor}, annotations=annotations)


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    *stable, release = shares
    share = {PERCENT: min(shares[release], NEARLY_ALL)} if stable else {}
    return [inference_service(endpoint, predictor(endpoint, release) | share), objects.disruption_budget(endpoint)]


class KnativeTarget(OneServiceTarget):
    def split(self) -> Split:
        service = self.objects.ours()
        if service is None or not _status(service).get("latestRolledoutRevision"):
            return Split(None)  # the first release gets all traffic as soon as it is ready
        stable, latest = self._stable(service), release_of(service["spec"]["predictor"])
        canary = latest if latest != stable else None
        return Split(stable, canary, self._shares(service)[canary] if canary else 0)

    def predictor(self, release: str) -> Object:
        return predictor(self.endpoint, release)

    def deploy(self, release: str) -> None:
        service = self.objects.ours()
        new = self.predictor(release)
        stable = self.split().stable
        if service and stable not in (None, release):
            latest = release_of(service["spec"]["predictor"])
            if latest not in (stable, release):
                raise tried_already(latest)
            new[PERCENT] = service["spec"]["predictor"].get(PERCENT, 0) if latest == release else 0
        if new["minReplicas"] == 0:
            waits = cold_start_of(self.endpoint, release)
            say(f"rollout: {release} has no replica while nobody asks; the next request then waits {waits}")
        self._apply(service, new)
        self.objects.apply_budget()
        self.objects.wait_until(
            lambda: "" if self._revision(new) else "Knative has made no revision", f"deploying {release}"
        )

    def deployment(self, release: str) -> str:
        return f"{self._revision(self._latest(release)[1])}-deployment"

    def ready(self, release: str) -> bool:
        service = self.service()
        latest = service["spec"]["predictor"]
        if release_of(latest) != release:
            return self.split().stable == release
        asleep = latest.get("minReplicas") == 0 and not self.pods.of(release)
        if not (asleep or self.pods.ready(release, revision_of(latest))):
            return False
        return _status(service).get("latestReadyRevision") == self._revision(latest)

    def url(self, release: str) -> str:
        """Find the URL of the revision's tag, which reaches only that revision, whatever the split."""
        releases = self._releases()
        for target in _status(self.service()).get("traffic", []):
            if releases.get(target.get("revisionName", "")) == release and target.get("url"):
                return str(target["url"]).rstrip("/")
        raise TransientError(f"{release} has no address of its own yet")

    def shift(self, release: str, percent: int, *, back: bool = False) -> None:
        service, latest = self._latest(release)
        percent = min(percent, NEARLY_ALL)
        if latest.get(PERCENT) != percent:
            self._apply(service, latest | {PERCENT: percent}, back=back)
        self._wait(release, percent)

    def promote(self, release: str) -> None:
        service, latest = self._latest(release)
        if PERCENT in latest:
            self._apply(service, _without_share(latest))
        self._wait(release, 100)
        self.apply_shared_address(release)

    def withdraw(self, release: str, *, first: bool = False) -> None:
        """Stop its traffic, which takes seconds; then apply the stable release's template, which removes its pods.

        Knative can go back only by a new revision, which gets traffic when it is ready. Until then the old revision of
        the stable release keeps all traffic; if the new one does not come up, it keeps it for good.
        """
        service = self.objects.ours()
        stable = self._stable(service) if service else None
        latest = release_of(service["spec"]["predictor"]) if service else None
        if stable in (None, release):
            if first and latest in (None, release):
                self.remove_all()
            elif service:
                raise needed(self.endpoint.store, release)
            return
        if latest == release:
            self.shift(release, 0, back=True)
            self._apply(self.service(), self.predictor(str(stable)) | {PERCENT: 0}, back=True)
        self._hand_over(str(stable))

    def replicas(self, release: str) -> Replicas:
        spec = self.service()["spec"]["predictor"]
        return Replicas(*self.pods.running(release), spec["minReplicas"], spec["maxReplicas"], int(spec["scaleTarget"]))

    def _hand_over(self, stable: str) -> None:
        """Let the stable release's new revision take over from the old one, once it is ready."""
        deadline, why = time.monotonic() + self.serving_of(stable).startup_timeout_s, ""
        while not why:
            service = self.service()
            latest = service["spec"]["predictor"]
            if release_of(latest) != stable or PERCENT not in latest:
                return
            try:
                if self.ready(stable):
                    # If the field were only left out, it would stay where somebody else owns it, too.
                    self._apply(service, latest | {PERCENT: 100}, back=True)
                    self._wait(stable, 100)
                    self._apply(self.service(), _without_share(latest), back=True)
                    return
                time.sleep(POLL_S)
            except ServerFailed as error:
                why = str(error)
            if time.monotonic() > deadline:
                why = "the new one is not ready"
        say(f"the old revision of {stable} stays: {why}")

    def _apply(self, former: Object | None, predictor: Object, *, back: bool = False) -> None:
        self.objects.apply(ISVCS, inference_service(self.endpoint, predictor), former, back=back)

    def _latest(self, release: str) -> tuple[Object, Object]:
        """Read the InferenceService and its predictor; raise Conflict if that serves another release."""
        service = self.service()
        latest: Object = service["spec"]["predictor"]
        if release_of(latest) != release:
            raise Conflict(f"{release} is not the canary, but {release_of(latest)} is", hint=AGAIN)
        return service, latest

    def _revisions(self) -> dict[str, Object]:
        """Read the metadata of each revision by its name: it has the labels of the predictor that it was made of."""
        revisions, _ = self.cluster.list(REVISIONS, labels=f"{objects.ISVC_LABEL}={self.endpoint.name}")
        return {revision["metadata"]["name"]: revision["metadata"] for revision in revisions}

    def _releases(self) -> dict[str, str]:
        """Find the release that each revision serves."""
        return {name: release for name, made in self._revisions().items() if (release := release_of(made))}

    def _revision(self, predictor: Object) -> str | None:
        """Find the newest revision of a predictor."""
        wanted = revision_of(predictor), release_of(predictor)
        alike = [name for name, made in self._revisions().items() if (revision_of(made), release_of(made)) == wanted]
        return max(alike, default=None)

    def _stable(self, service: Object) -> str | None:
        """Find the release that gets the traffic that a canary does not get; Knative tags it prev."""
        traffic = _status(service).get("traffic", [])
        tagged = [target.get("revisionName") for target in traffic if target.get("tag") == "prev"]
        return self._releases().get(tagged[0] if tagged else _status(service).get("latestRolledoutRevision", ""))

    def _shares(self, service: Object) -> Counter[str | None]:
        """Add up the percentage that Knative routes to each release."""
        releases, percent = self._releases(), Counter[str | None]()
        for target in _status(service).get("traffic", []):
            percent[releases.get(target.get("revisionName") or "")] += int(target.get("percent") or 0)
        return percent

    def _wait(self, release: str, percent: int) -> None:
        """Wait until a release's percentage is in force."""

        def unfinished() -> str:
            service = self.service()
            latest = service["spec"]["predictor"]
            if (release_of(latest), latest.get(PERCENT, 100)) != (release, percent):
                raise Conflict(f"somebody else changed the share of {release}", hint=AGAIN)
            if (present := self._shares(service)[release]) != percent:
                return f"Knative gives it {present} %"
            # Ready is false while a new revision comes up; only the condition of the routes counts.
            return "" if condition(service, "RoutesReady") else "its routes are not ready"

        self.objects.wait_until(unfinished, f"{percent} % for {release}")


def _status(service: Object) -> Object:
    status: Object = service.get("status", {}).get("components", {}).get("predictor", {})
    return status


def _without_share(predictor: Object) -> Object:
    return {key: value for key, value in predictor.items() if key != PERCENT}


MODE = Mode(
    name="knative",
    target=KnativeTarget,
    services=ISVCS,
    owns=lambda service: service["metadata"].get("annotations", {}).get(objects.DEPLOYMENT_MODE) in NAMES,
    suits=lambda setup: setup.default_mode in NAMES,
    check=lambda setup: setup.cluster.require(REVISIONS),
    render=render,
    autoscaler="Knative",
)
