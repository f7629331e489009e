"""Every option of a command is a keyword of the Python function of the same name, with the same default."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import typer

import regard
from regard.cli.base import app

PRINTS = {"as_json": "a function returns its result", "help": "see help(function)"}
# Parameters of commands that are not keywords of the function, with the keyword that replaces them or the reason.
ONLY_COMMAND: Mapping[str, Mapping[str, str]] = {
    "translate": PRINTS | {"runs": "run, texts", "stream": "TrainedModel.stream returns an iterator"},
    "generate": PRINTS | {"runs": "run", "prompt": "prompts", "stream": "TrainedModel.stream returns an iterator"},
    "classify": PRINTS | {"file": "texts"},
    "score": PRINTS | {"source": "texts", "target": "texts", "outputs": "texts"},
    "evaluate": PRINTS,
    "train": PRINTS | {"no_cache": "cache"},
    "resume": PRINTS | {"run": "path"},
    "ablate": PRINTS,
    "serve": PRINTS,
    "compare": PRINTS | {"plot": "RunComparison.plot"},
    "attention": PRINTS | {"threads": "see torch.set_num_threads"},
    "heads": PRINTS | {"plot": "HeadTable.plot"},
    "align": PRINTS,
    "prune": PRINTS,
}
EMPTY = (None, (), "", [])


def options(name: str) -> dict[str, Any]:
    """The parameters of a command by name."""
    group: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in group.commands[name].params}


@pytest.mark.parametrize("name", ONLY_COMMAND)
def test_every_option_has_a_keyword(name: str) -> None:
    keywords = inspect.signature(getattr(regard, name)).parameters
    missing = options(name).keys() - keywords.keys()
    assert missing <= ONLY_COMMAND[name].keys()
    for replaced in ONLY_COMMAND[name].values():
        assert " " in replaced or "." in replaced or replaced in keywords


@pytest.mark.parametrize("name", ONLY_COMMAND)
def test_options_and_keywords_have_the_same_default(name: str) -> None:
    keywords = inspect.signature(getattr(regard, name)).parameters
    # A function prints nothing; the folder is required; the command sets the batch size to 32.
    exceptions = {"quiet", "out", "batch_size"}
    for option, parameter in options(name).items():
        if option in keywords and option not in exceptions and keywords[option].kind is inspect.Parameter.KEYWORD_ONLY:
            default = keywords[option].default
            assert parameter.default == default or (parameter.default in EMPTY and default in EMPTY), option


@pytest.mark.parametrize("name", ["translate", "translations", "generate", "stream"])
def test_methods_take_the_keywords_of_the_functions(name: str) -> None:
    method = inspect.signature(getattr(regard.TrainedModel, name)).parameters
    for option in ("beam", "temperature", "top_k", "top_p", "seed", "max_len", "prefix", "banned", "required"):
        assert option in method


def test_typed_dicts_have_the_keywords_of_the_functions() -> None:
    """Type checkers read the keywords from a TypedDict, `inspect` reads them from the signature."""
    from regard.runs import options as typed

    keywords = set(inspect.signature(regard.translate).parameters)
    assert set(typed.TranslationOptions.__annotations__) <= keywords
    assert set(typed.LoadOptions.__annotations__) <= keywords
    assert set(typed.RequestOptions.__annotations__) <= set(inspect.signature(regard.train).parameters)
    assert set(typed.EvaluationOptions.__annotations__) <= set(inspect.signature(regard.evaluate).parameters)
