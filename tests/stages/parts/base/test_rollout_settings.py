from __future__ import annotations

import pytest

from stages.parts.base.errors import ConfigError
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.settings import parse


@pytest.mark.parametrize(
    ("name", "hint"), [("significance", "rollout.error_rate is that of a whole"), ("speed_ratio", "rollout.tpot_ratio")]
)
def test_a_field_that_was_replaced_names_what_there_is_in_its_place(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: there is no such field any more: {hint}"):
        parse(Rollout, {name: 0.01}, "the configuration")
