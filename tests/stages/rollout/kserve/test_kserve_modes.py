"""A mode of KServe is one package and one line: nothing else knows the modes by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from pydantic import ValidationError

from stages.parts.releases.release import Split
from stages.rollout.kserve import modes
from stages.rollout.kserve.detect import detect, served_modes
from stages.rollout.kserve.modes import render
from stages.rollout.kserve.settings import KServe
from tests.serving import REPOSITORY
from tests.stages.rollout.kserve import made_up_mode
from tests.stages.rollout.kserve.made_up_mode import LABEL, NAME
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT

Serve = Callable[..., OnKServe]


@pytest.fixture
def made_up() -> Iterator[None]:
    """The line; before ``route``, whose label the mode's objects have, too."""
    known = dict(modes.MODES)
    modes.MODES.clear()
    modes.MODES.update({NAME: made_up_mode.__name__, **known})
    yield
    modes.MODES.clear()
    modes.MODES.update(known)


@pytest.mark.usefixtures("made_up")
def test_a_mode_from_outside_is_set_chosen_rendered_served_and_kept(serve: Serve) -> None:
    kserve = serve(**MODES["route"] | {"mode": "MadeUp"})
    assert KServe(mode=NAME).mode == NAME
    assert detect(kserve.cluster(), KServe()).mode == NAME
    kserve.first()
    kserve.make(NEXT)
    assert [body["kind"] for body in render(kserve.endpoint(), NEXT, GOOD, NAME, 10) if LABEL in str(body)] == [
        "InferenceService",
        "InferenceService",
    ]
    assert kserve.roll(NEXT).state == "promoted"
    kserve.kserve.mode = "RawDeployment"
    kserve.kserve.configure()
    target = kserve.connect()
    assert (target.installation.mode, target.split()) == (NAME, Split(NEXT))
    assert set(served_modes(kserve.cluster())[kserve.store.model]) == {NAME}


def test_a_mode_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValidationError, match="should be one of auto, standard, knative, route, llm"):
        KServe(mode=NAME)


def test_a_mode_is_known_by_name_in_its_own_module_and_the_registry_alone() -> None:
    asked = re.compile(rf"""\bmode\b.*["'](?:{"|".join(modes.MODES)})["']""")
    product = [path for root in ("stages", "pipeline") for path in (REPOSITORY / root).rglob("*.py")]
    outside = [path for path in product if not {path.parent.name, path.stem} & modes.MODES.keys()]
    assert [path.name for path in outside if asked.search(path.read_text())] == []
