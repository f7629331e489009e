from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from regard.data.objectives import LanguageModelling, Objective, Translation
from regard.data.text import ParallelFiles
from regard.errors import DataError, SpecError
from regard.runs.trained_model import TrainedModel
from regard.serving import serve
from regard.serving.languages import NAMES, code_in, detect
from regard.serving.serve import pairs_of, read_keys
from regard.serving.settings import Pair, Settings


def run(source: str = "a", target: str = "b", objective: Objective | None = None) -> TrainedModel:
    """A trained model of which only the recipe is known."""
    model = object.__new__(TrainedModel)
    data = SimpleNamespace(train=(ParallelFiles(source, target),), objective=objective or Translation())
    model.recipe = cast(Any, SimpleNamespace(data=data))
    return model


def test_languages_are_those_of_the_option_or_of_the_training_files() -> None:
    models = {"a": run(), "b": run("train.en", "train.de.gz"), "c": run(objective=LanguageModelling())}
    assert pairs_of(models, []) == {"b": Pair("en", "de")}
    assert pairs_of(models, ["runs/a=fr:en", "b=nl:de"]) == {"a": Pair("fr", "en"), "b": Pair("nl", "de")}
    assert pairs_of({"a": run()}, ["en:de"]) == {"a": Pair("en", "de")}


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("en:de", "write RUN=en:de"), ("a=en", "write RUN=en:de"), ("c=en:de", "is no run that translates"),
        ("a=en:xx", "'xx' is not a language code"), ("a=en:en", "same language twice"), ("a=en:de", "both translate"),
    ],
)  # fmt: skip
def test_options_that_name_no_languages_are_refused(option: str, sentence: str) -> None:
    models = {"a": run(), "b": run("train.en", "train.de"), "c": run(objective=LanguageModelling())}
    with pytest.raises(SpecError, match=sentence):
        pairs_of(models, [option])


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("train.en", "en"), ("/x/corpus.DE.gz", "de"), ("train-fr.txt", "fr"), ("train_nl.txt.xz", "nl"),
        ("train.txt", None), ("en", None), ("a.source", None), ("no-language", None),
    ],
)  # fmt: skip
def test_language_codes_are_read_from_file_names(file: str, code: str | None) -> None:
    assert code_in(file) == code


def test_names_of_languages() -> None:
    assert NAMES["de"] == "German"
    assert NAMES["gd"] == "Scottish Gaelic"
    assert all(len(code) == 2 and name[0].isupper() for code, name in NAMES.items())


def test_language_is_detected_among_those_of_the_models() -> None:
    found = detect("Der Hund und die Katze schlafen heute im Garten.", ["en", "de", "fr"])
    assert found[0][0] == "de"
    assert sum(probability for _, probability in found) == pytest.approx(1.0)
    assert detect("Guten Morgen", ["en", "fr"])[0][0] in {"en", "fr"}
    assert detect("123 !?", ["en"]) == []


def test_keys_are_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_API_KEY", raising=False)
    assert read_keys(None) == ()
    monkeypatch.setenv("REGARD_API_KEY", "first-key\nsecond-key\n")
    assert read_keys(None) == ("first-key", "second-key")
    (tmp_path / "keys").write_text("\nonly-key\n\n")
    assert read_keys(tmp_path / "keys") == ("only-key",)
    monkeypatch.setenv("REGARD_API_KEY", "  ")
    with pytest.raises(DataError, match="contains no API key"):
        read_keys(None)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "fastapi" else object())
    with pytest.raises(DataError, match=r"the server needs fastapi: pip install 'regard\[serve\]'"):
        serve.check_installed()


@pytest.mark.parametrize(
    "limit", [{"queue": 0}, {"max_batch": 0}, {"max_body": -1}, {"timeout": 0.0}, {"timeout": float("inf")}]
)
def test_limits_below_one_are_refused(limit: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(limit))):
        Settings(**limit)


@pytest.mark.parametrize(
    "name", ["my.example:80", "https://my.example", "my.example/", "*", "[::1]", "", "münchen.example"]
)
def test_host_that_no_header_can_name_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="--allow-host"):
        Settings(allow_hosts=(name,))
    assert Settings(allow_hosts=("my.example", "GPU_7", "fe80::1", "10.0.0.1"))


@pytest.mark.parametrize(
    "origin", ["my.example", "https://my.example/", "https://my.example/page", "*", "https://My.example"]
)
def test_origin_that_no_header_can_name_is_refused(origin: str) -> None:
    with pytest.raises(SpecError, match="--allow-origin"):
        Settings(allow_origins=(origin,))
    assert Settings(allow_origins=("https://my.example:8080", "http://localhost", "http://[::1]:80", "null"))
