from __future__ import annotations

from pathlib import Path

import pytest

from stages.parts.base.errors import InvalidName
from stages.parts.model.name import ModelName


@pytest.mark.parametrize("source", ["gpt2", "org/name", "org/na.me", "_x/y"])
def test_a_hub_name_is_its_own_id(source: str) -> None:
    assert ModelName.parse(source) == ModelName(source, source, None)


@pytest.mark.parametrize(
    "source", ["a/b/c", "org/..", "org/na me", "-x", "/", "org/name\n", "org--a/b", "", "org/", "a" * 97, "x/./y"]
)
def test_a_name_that_cannot_be_a_folder_is_refused(source: str) -> None:
    with pytest.raises(InvalidName):
        ModelName.parse(source)


@pytest.mark.parametrize(
    ("source", "directory"),
    [
        ("./my-model/", "work/my-model"),
        ("./a/../my-model", "work/my-model"),
        ("../my-model", "my-model"),
        ("~/my-model", "home/my-model"),
        (".", "work"),
        ("..", ""),
    ],
)
def test_a_path_names_a_model_of_the_owner_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, directory: str
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = tmp_path / directory
    assert ModelName.parse(source) == ModelName(source, f"local/{expected.name}", expected)
    assert ModelName.parse(str(expected)).directory == expected


def test_a_symbolic_link_names_the_model_instead_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "my-model").symlink_to("my model")
    assert ModelName.parse(str(tmp_path / "my-model")).id == "local/my-model"
    with pytest.raises(InvalidName, match="can't name a model"):
        ModelName.parse(str(tmp_path / "my model"))


def test_the_home_of_an_unknown_user_is_kept_as_written() -> None:
    assert ModelName.parse("~nobody-of-this-name/x").directory == Path("~nobody-of-this-name/x").absolute()
