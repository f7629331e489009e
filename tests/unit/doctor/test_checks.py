"""Single checks: levels, line numbers and evidence."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from regard.doctor.case import Case
from regard.doctor.checks import language
from regard.doctor.checks.alignment import alignment
from regard.doctor.checks.copies import copies
from regard.doctor.checks.duplicates import duplicates, many_targets
from regard.doctor.checks.encoding import encoding
from regard.doctor.checks.labels import labels
from regard.doctor.checks.lengths import lengths, ratios
from regard.doctor.checks.markup import controls, is_mojibake, markup, mojibake
from regard.doctor.checks.overlap import overlap
from regard.doctor.checks.swapped import swapped
from regard.doctor.checks.unseen import unseen
from regard.doctor.examine import text_report
from regard.doctor.finding import Finding
from regard.doctor.sentences import sentences
from regard.runs.request import request_from_options

Make = Callable[..., Case]
MADE = sentences(400, 5)
ENGLISH, GERMAN, FRENCH = (list(column) for column in zip(*MADE, strict=True))


@pytest.fixture
def case(tmp_path: Path) -> Make:
    def build(
        source: list[str], target: list[str], valid: list[tuple[str, str]] | None = None, *, names: str = "en de"
    ) -> Case:
        files: dict[str, Any] = {}
        valid_source, valid_target = zip(*valid, strict=True) if valid else ((), ())
        texts = {"source": source, "target": target, "valid_source": valid_source, "valid_target": valid_target}
        for (name, lines), ending in zip(texts.items(), 2 * names.split(), strict=True):
            if lines:
                files[name] = tmp_path / f"{name}.{ending}"
                files[name].write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
        return Case.of(request_from_options(**files))

    return build


@pytest.fixture
def labelled(tmp_path: Path) -> Make:
    def build(lines: list[str], valid: list[str] | None = None) -> Case:
        (tmp_path / "train").write_text("\n".join(lines) + "\n")
        if valid:
            (tmp_path / "valid").write_text("\n".join(valid) + "\n")
        options: dict[str, Any] = {"labelled": tmp_path / "train", **({"valid": tmp_path / "valid"} if valid else {})}
        return Case.of(request_from_options(**options))

    return build


def one(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_few_duplicates_are_a_note_with_line_numbers(case: Make) -> None:
    found = one(duplicates(case(ENGLISH + ENGLISH[:2], GERMAN + GERMAN[:2])))
    assert found.level == "note"
    assert found.lines == (401, 402)


def test_many_duplicates_are_a_warning(case: Make) -> None:
    assert one(duplicates(case(ENGLISH + ENGLISH[:100], GERMAN + GERMAN[:100]))).level == "warning"


def test_many_repeated_single_words_are_a_note(case: Make) -> None:
    words = ["Yes."] * 100
    assert one(duplicates(case(ENGLISH + words, GERMAN + ["Ja."] * 100))).level == "note"


@pytest.mark.parametrize(("shared", "level"), [(1, "note"), (10, "warning"), (190, "error")])
def test_overlap_is_graded_and_gives_both_lines(case: Make, shared: int, level: str) -> None:
    valid = list(zip(ENGLISH[:shared] + FRENCH[shared:200], GERMAN[:200], strict=True))
    found = one(overlap(case(ENGLISH, GERMAN, valid)))
    assert found.level == level
    assert found.lines[0] == 1
    assert "valid_source.en: line 1 is" in found.evidence[0]
    assert "source.en: line 1" in found.evidence[0].split(" is ")[1]


def test_unequal_files_name_the_line_at_which_they_part(case: Make) -> None:
    found = one(alignment(case(ENGLISH, GERMAN[:200] + GERMAN[201:])))
    assert found.level == "error"
    assert "400 lines" in found.message
    assert abs(found.lines[0] - 201) <= 12


def test_a_file_that_is_cut_at_the_end_is_told_from_a_shift(case: Make) -> None:
    found = one(alignment(case(ENGLISH, GERMAN[:350])))
    assert "the end of" in found.message
    assert "target.de" in found.message


def test_shuffled_targets_do_not_correlate(case: Make) -> None:
    found = one(alignment(case(ENGLISH, random.Random(1).sample(GERMAN, 400))))
    assert found.level == "error"
    assert "do not correlate" in found.message


def test_copies_of_a_paraphrase_corpus_are_a_note(case: Make) -> None:
    target = [text if i % 3 else text.replace("the", "one") for i, text in enumerate(ENGLISH)]
    assert one(copies(case(ENGLISH, target))).level == "note"


def test_single_words_may_equal_their_source(case: Make) -> None:
    assert one(copies(case(["Haus"] * 100 + ENGLISH, ["Haus"] * 100 + GERMAN))).level == "note"


def test_copies_of_whole_sentences_are_an_error_if_they_are_most(case: Make) -> None:
    found = one(copies(case(ENGLISH, ENGLISH[:300] + GERMAN[300:])))
    assert found.level == "error"


def test_a_target_for_many_sources_is_a_warning(case: Make) -> None:
    target = ["Keine Übersetzung."] * 30 + GERMAN[30:]
    assert [finding.level for finding in many_targets(case(ENGLISH, target))] == ["warning"]


def test_classes_as_targets_are_no_placeholders(case: Make) -> None:
    assert list(many_targets(case(ENGLISH, [("yes", "no")[i % 2] for i in range(400)]))) == []


def test_exchanged_pairs_are_listed_by_line(case: Make) -> None:
    source, target = list(ENGLISH), list(GERMAN)
    for i in (10, 20, 30):
        source[i], target[i] = target[i], source[i]
    found = one(swapped(case(source, target)))
    assert found.lines == (11, 21, 31)


def test_validation_text_with_exchanged_sides_is_an_error(case: Make) -> None:
    found = one(swapped(case(ENGLISH, GERMAN, list(zip(GERMAN[:50], ENGLISH[:50], strict=True)))))
    assert found.level == "error"
    assert found.message.startswith("validation text")


def test_encoding_error_names_lines_and_command(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"gr\xfcn\n" * 50)
    (tmp_path / "b").write_bytes(b"green\n" * 50)
    found = one(encoding(Case.of(request_from_options(source=tmp_path / "a", target=tmp_path / "b"))))
    assert found.level == "error"
    assert found.lines[:3] == (1, 2, 3)
    assert "grün" in found.evidence[1]
    assert "iconv" in found.advice


@pytest.mark.parametrize("text", ["grÃ¼n", "Ã–l", "itâ€™s", "caf\ufffd", "Ð¿Ñ€Ð¸"])  # noqa: RUF001
def test_mojibake_is_recognised(text: str) -> None:
    assert is_mojibake(text)


@pytest.mark.parametrize("text", ["grün", "Ô, À la carte", "ÂME", "naïve Ångström", "привет", "«Ça»", "日本語"])
def test_correct_text_is_no_mojibake(text: str) -> None:
    assert not is_mojibake(text)


def test_markup_of_the_moses_tokenizer_is_no_fault(case: Make) -> None:
    source = [text.replace(".", " &apos;s .").replace("!", " .") for text in ENGLISH]
    assert list(markup(case(source, GERMAN))) == []
    assert one(markup(case([f"<b>{text}</b>" for text in source], GERMAN))).level == "warning"


def test_single_strange_lines_are_notes(case: Make) -> None:
    target = [*GERMAN[:-1], "Ã¼ber \x0b das Meer"]
    assert one(mojibake(case(ENGLISH, target))).level == "note"
    found = one(controls(case(ENGLISH, target)))
    assert found.level == "note"
    assert "U+000B" in found.message


def test_long_lines_are_graded_by_how_extreme_they_are(case: Make) -> None:
    usual = max(map(len, ENGLISH))
    assert one(lengths(case([*ENGLISH, "a " * 6 * usual], [*GERMAN, "b"]))).level == "note"
    assert one(lengths(case([*ENGLISH, "a " * 40 * usual], [*GERMAN, "b"]))).level == "warning"
    assert list(lengths(case([*ENGLISH, "a " * 300], [*GERMAN, "b"]))) == []


def test_lengths_of_different_scripts_are_compared_with_the_usual_ratio(case: Make) -> None:
    short = [text[: max(4, len(text) // 4)] for text in GERMAN]
    assert list(ratios(case(ENGLISH, short))) == []
    assert one(ratios(case(ENGLISH, [short[0][:1] * 200, *short[1:]]))).lines == (1,)


def test_languages_are_compared_with_file_names_and_between_texts(case: Make) -> None:
    swapped_names = list(language.language(case(ENGLISH, GERMAN, names="de en")))
    assert [finding.level for finding in swapped_names] == ["warning", "warning"]
    assert "is named 'de', but its text is in 'en'" in swapped_names[0].message
    assert list(language.language(case(ENGLISH, GERMAN, names="src tgt"))) == []
    other = list(
        language.language(case(ENGLISH, GERMAN, list(zip(ENGLISH[:99], FRENCH[:99], strict=True)), names="a b"))
    )
    assert [finding.level for finding in other] == ["error"]


def test_without_py3langid_the_check_is_skipped_and_that_is_reported(
    case: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "find_spec", lambda _: None)
    report = text_report(case(ENGLISH, GERMAN))
    assert [(each.check, each.why) for each in report.skipped] == [
        ("language", "needs py3langid: pip install 'regard[doctor]'")
    ]


def test_unseen_characters_are_listed(case: Make) -> None:
    found = list(unseen(case(ENGLISH, GERMAN, [(ENGLISH[0] + "§", GERMAN[0])] * 60)))
    assert "U+00A7" in found[0].message


def test_labels(labelled: Make) -> None:
    lines = [f"{'good' if i % 2 else 'bad'}\ttext {i}" for i in range(100)]
    assert list(labels(labelled(lines))) == []
    header = one(labels(labelled(["label\ttext", *lines])))
    assert (header.level, header.lines) == ("warning", (1,))
    noisy = one(labels(labelled([*lines, "good\ttext 0", "good\ttext 2", "good\ttext 4"])))
    assert (noisy.level, noisy.lines[:2]) == ("warning", (1, 3))
    assert one(labels(labelled([*lines, "Good\tx", "Good\ty"]))).message == "1 label is written in several ways"
    assert one(labels(labelled(lines, ["great\tx"]))).level == "error"
    assert "are probably no classes" in one(labels(labelled([f"{i}\ttext {i}" for i in range(50)]))).message.replace(
        "so they ", ""
    )
    assert one(labels(labelled(lines[:2] + [f"good\tnice {i}" for i in range(50)] + ["bad\tno"]))).level == "warning"
