"""Knative mode: one InferenceService. Its latest revision gets ``canaryTrafficPercent``, the previous one the rest.

A new template is a new revision. A revision's labels say what it serves; ``status.components.predictor.traffic`` says
which share it gets. At 100 % Knative removes the pods of the previous revision at once. The last step therefore gives
99 %, so that a rollback takes seconds, and promoting gives the rest.
"""

from __future__ import annotations

import sys
import time
from typing import Final

from stages.parts.base.errors import Conflict, ServerFailed, TransientError
from stages.parts.cluster.kinds import Kind
from stages.parts.releases.split import Split
from stages.rollout.kserve.kept import ISVCS
from stages.rollout.kserve.objects import ISVC_LABEL, RELEASE, REVISION, Object, inference_service, predictor, startup_s
from stages.rollout.kserve.target import KServeTarget, condition, release_of, revision_of, url_of
from stages.rollout.target import Replicas

REVISIONS: Final = Kind("serving.knative.dev/v1", "Revision", "revisions")
PERCENT: Final = "canaryTrafficPercent"
NEARLY_ALL: Final = 99


class KnativeTarget(KServeTarget):
    def split(self) -> Split:
        found = self.service()
        if found is None:
            return Split(None)
        status = self._status(found)
        rolled_out = status.get("latestRolledoutRevision")
        if not rolled_out:
            return Split(None)  # the first release gets all traffic as soon as it is ready
        releases = self._releases()
        stable = self._stable(found, releases)
        asked = release_of(found["spec"]["predictor"])
        canary = asked if asked != stable else None
        percent = sum(self._shares(found).get(name, 0) for name, each in releases.items() if each == canary)
        return Split(stable, canary, percent if canary else 0)

    def deploy(self, release: str) -> None:
        found = self.service()
        wanted = predictor(self.endpoint, release, "knative")
        stable = self.split().stable
        if found and stable not in (None, release):
            asked = release_of(found["spec"]["predictor"])
            if asked not in (stable, release):
                raise Conflict(f"{asked} is being tried already", hint="end that rollout first")
            kept = found["spec"]["predictor"].get(PERCENT, 0) if asked == release else 0
            wanted[PERCENT] = kept
        self._apply(found, wanted)
        self.apply_budget()
        self.wait_until(
            lambda: "" if self._revision(wanted) else "Knative has made no revision", f"deploying {release}"
        )

    def ready(self, release: str) -> bool:
        found = self._service()
        asked = found["spec"]["predictor"]
        if release_of(asked) != release:
            return self.split().stable == release
        if not self.pods.ready(release, revision_of(asked)):
            return False
        return self._status(found).get("latestReadyRevision") == self._revision(asked)

    def url(self, release: str) -> str:
        """The URL of the revision's tag, which reaches only that revision, whatever the split."""
        releases = self._releases()
        for each in self._status(self._service()).get("traffic", []):
            if releases.get(each.get("revisionName", "")) == release and each.get("url"):
                return str(each["url"]).rstrip("/")
        raise TransientError(f"{release} has no address of its own yet")

    def shift(self, release: str, percent: int) -> None:
        self._set_share(release, percent)

    def _set_share(self, release: str, percent: int, *, back: bool = False) -> None:
        found = self._service()
        asked = found["spec"]["predictor"]
        if release_of(asked) != release:
            raise Conflict(f"{release} is not the canary, but {release_of(asked)} is", hint="deploy it first")
        percent = min(percent, NEARLY_ALL)
        if asked.get(PERCENT) != percent:
            self._apply(found, asked | {PERCENT: percent}, back=back)
        self._wait(release, percent)

    def promote(self, release: str) -> None:
        found = self._service()
        asked = found["spec"]["predictor"]
        if release_of(asked) != release:
            raise Conflict(f"{release_of(asked)} has taken its place meanwhile", hint="start the rollout again")
        if PERCENT in asked:
            self._apply(found, {key: value for key, value in asked.items() if key != PERCENT})
        self._wait(release, 100)

    def withdraw(self, release: str, *, first: bool = False) -> None:
        """Stop its traffic, which takes seconds; then apply the stable release's template, which removes its pods.

        Knative can go back only by a new revision, which gets traffic when it is ready. Until then the old revision of
        the stable release keeps all traffic; if the new one does not come up, it keeps it for good.
        """
        found = self.service()
        stable = self._stable(found, self._releases()) if found else None
        asked = release_of(found["spec"]["predictor"]) if found else None
        if stable in (None, release):
            if first and asked in (None, release):
                self.remove_all()
            elif found:
                raise self.refusal(release)
            return
        if asked == release:
            self._set_share(release, 0, back=True)
            self._apply(self._service(), predictor(self.endpoint, str(stable), "knative") | {PERCENT: 0}, back=True)
        self._hand_over(str(stable))

    def replicas(self, release: str) -> Replicas:
        """See ``Autoscaled``: Knative scales every revision."""
        asked = self._service()["spec"]["predictor"]
        return Replicas(
            *self.pods.running(release), asked["minReplicas"], asked["maxReplicas"], int(asked["scaleTarget"])
        )

    def client_url(self) -> str:
        return url_of(self.service(), self.endpoint.store.model)

    def _hand_over(self, stable: str) -> None:
        """Let the stable release's new revision take over from the old one, once it is ready."""
        deadline, why = time.monotonic() + startup_s(self.endpoint, stable), ""
        while not why:
            found = self._service()
            asked = found["spec"]["predictor"]
            if release_of(asked) != stable or PERCENT not in asked:
                return
            try:
                if self.ready(stable):
                    # If the field were only left out, it would stay where somebody else owns it, too.
                    self._apply(found, asked | {PERCENT: 100}, back=True)
                    self._wait(stable, 100)
                    without = {key: value for key, value in asked.items() if key != PERCENT}
                    self._apply(self._service(), without, back=True)
                    return
                time.sleep(self.poll_s)
            except ServerFailed as error:
                why = str(error)
            if time.monotonic() > deadline:
                why = "the new one is not ready"
        print(f"the old revision of {stable} stays: {why}", file=sys.stderr, flush=True)

    def _apply(self, seen: Object | None, wanted: Object, *, back: bool = False) -> None:
        self.apply(ISVCS, inference_service(self.endpoint, wanted, "knative"), seen, back=back)

    def _service(self) -> Object:
        found = self.service()
        if found is None:
            raise Conflict(f"{self.endpoint.store.model} is not being served", hint="start the rollout again")
        return found

    def _status(self, service: Object) -> Object:
        found: Object = service.get("status", {}).get("components", {}).get("predictor", {})
        return found

    def _revisions(self) -> list[Object]:
        found, _ = self.cluster.list(REVISIONS, labels=f"{ISVC_LABEL}={self.endpoint.name}")
        return found

    def _releases(self) -> dict[str, str]:
        """The release of each revision."""
        named = (
            (revision["metadata"]["name"], revision["metadata"].get("labels", {})) for revision in self._revisions()
        )
        return {name: labels[RELEASE] for name, labels in named if RELEASE in labels}

    def _revision(self, wanted: Object) -> str | None:
        """The newest revision of a predictor."""
        alike = [
            revision
            for revision in self._revisions()
            if revision["metadata"].get("labels", {}).get(REVISION) == revision_of(wanted)
            and revision["metadata"]["labels"].get(RELEASE) == release_of(wanted)
        ]
        return max((str(each["metadata"]["name"]) for each in alike), default=None)

    def _stable(self, service: Object, releases: dict[str, str]) -> str | None:
        """The release that gets the traffic that a canary does not get; Knative tags it prev."""
        status = self._status(service)
        kept = [each.get("revisionName") for each in status.get("traffic", []) if each.get("tag") == "prev"]
        return releases.get(kept[0] if kept else status.get("latestRolledoutRevision", ""))

    def _shares(self, service: Object) -> dict[str, int]:
        """The percentage that Knative routes to each revision."""
        found: dict[str, int] = {}
        for each in self._status(service).get("traffic", []):
            name = each.get("revisionName") or ""
            found[name] = found.get(name, 0) + int(each.get("percent") or 0)
        return found

    def _wait(self, release: str, percent: int) -> None:
        def lacking() -> str:
            found, releases = self._service(), self._releases()
            asked = found["spec"]["predictor"]
            if (release_of(asked), asked.get(PERCENT, 100)) != (release, percent):
                raise Conflict(f"somebody else changed the share of {release}", hint="start the rollout again")
            share = sum(part for name, part in self._shares(found).items() if releases.get(name) == release)
            if share != percent:
                return f"Knative gives it {share} %"
            # Ready is false while a new revision comes up; only the condition of the routes counts.
            return "" if condition(found, "RoutesReady") else "its routes are not ready"

        self.wait_until(lacking, f"{percent} % for {release}")
