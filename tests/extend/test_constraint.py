"""A user-defined decoding constraint, written outside the package, in every search."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

import regard
from regard.decoding.beam import Beam
from regard.decoding.constraint import BannedWords, ForcedPrefix, MinLength, bind_all
from regard.decoding.sample import Sample
from regard.errors import SpecError
from regard.runs.trained_model import TrainedModel
from tests.extend.command import User

MY_CONSTRAINT = '''
from dataclasses import dataclass

from regard.decoding.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Alternate(Constraint):
    """No token twice in a row, and the end after `tokens` tokens."""

    kind = "alternate"
    tokens: int = 6

    def banned(self, output, tokenizer):
        return output[-1:]

    def forced(self, output, tokenizer):
        return tokenizer.eos if len(output) == self.tokens else None
'''
NAME = "my_constraint:Alternate"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    user = User.of(tmp_path_factory.mktemp("user"), "my_constraint", MY_CONSTRAINT)
    (user.folder / "in.txt").write_text("one house\nred dog\n")
    user.train("run", 2, "--set", f'decode.constraints=["{NAME}"]')
    return user


@pytest.fixture(scope="module")
def run(user: User) -> TrainedModel:
    return regard.load(user.folder / "run", trust_code=True)


def alternates(ids: tuple[int, ...], tokens: int) -> bool:
    return len(ids) <= tokens and all(a != b for a, b in pairwise(ids))


@pytest.mark.parametrize("search", [Beam(1), Beam(4, 3), Beam(4, groups=2, diversity=0.5), Sample(n_best=3)])
def test_user_constraint_holds_in_every_search(run: TrainedModel, search: Beam | Sample) -> None:
    from my_constraint import Alternate  # type: ignore[import-not-found]

    (constraint,) = run.recipe.decode.constraints  # type: ignore[attr-defined]
    assert constraint == Alternate(6)
    for best in run.translations(["one house", "red dog"], search=replace(search, constraints=(Alternate(4),))):
        assert all(alternates(output.ids, 4) for output in best)
    (free, *_) = run.translations(["one house"], search=search)
    assert not all(alternates(output.ids, 4) for output in free)


def test_user_constraint_is_read_from_the_recipe_and_from_options(user: User) -> None:
    words = ("translate", "run", "in.txt", "--json", "--trust-code")
    for options, tokens in (
        ((), 6),
        (("--beam", "1"), 6),
        (("--set", f'constraints=[{{kind = "{NAME}", tokens = 3}}]'), 3),
        (("--ban", "x"), 6),
    ):
        outputs = [line[0] for line in json.loads(user.run(*words, *options).out)]
        assert all(len(output["tokens"]) == tokens for output in outputs), options
    streamed = user.run("translate", "run", "in.txt", "--stream", "--beam", "1", "--trust-code")
    assert streamed.out == user.run("translate", "run", "in.txt", "--beam", "1", "--trust-code").out
    assert "'my_constraint:Alternate' would import code" in user.refusal("translate", "run", "in.txt")


def test_ctranslate2_refuses_user_constraints(user: User, run: TrainedModel) -> None:
    pytest.importorskip("ctranslate2")
    with pytest.raises(SpecError, match="alternate: cannot be used as given with the engine 'ctranslate2'"):
        run.translate(["one house"], engine="ctranslate2")


def test_built_in_constraints_are_part_of_a_search(run: TrainedModel) -> None:
    search = Beam(3, constraints=(ForcedPrefix("ab"), MinLength(5), BannedWords(("abc",))))
    (best,) = run.translations(["one house"], search=search)
    assert best[0].text.startswith("ab")
    assert not best[0].text.startswith("abc")
    assert len(best[0].ids) >= 5
    with pytest.raises(SpecError, match="two prefixes are given"):
        bind_all((ForcedPrefix("a"), ForcedPrefix("b")), run.tokenizer)
