# ruff: noqa: RUF001  # texts in other scripts
"""The metric and the tokenizer that are chosen from a target text."""

import pytest

from regard.evaluation.metrics import bleu, chrf
from regard.evaluation.target_text import bleu_tokenizer, choose


@pytest.mark.parametrize(
    ("lines", "criterion", "tokenize"),
    [
        (["A man is riding a horse.", "Two dogs are playing in the snow."], "bleu", "13a"),
        (["einhundertsiebenunddreißig", "zwölf", "acht"], "chrf", "13a"),
        (["Hello there.", "Good morning.", "a b"], "chrf", "13a"),
        (["他去年卖了四千个苹果", "桌子上有三个杯子。"], "bleu", "zh"),
        (["苹果", "书本", "汽车"], "chrf", "zh"),
        (["彼は昨日りんごを買いました", "机の上に本があります"], "bleu", "char"),
        (["วันนี้อากาศดีมาก", "ฉันชอบกินข้าว"], "bleu", "char"),
        (["그는 어제 사과를 세 개 샀다", "책상 위에 책이 있다 정말로"], "bleu", "13a"),
        (["Он купил три яблока вчера", "На столе лежит старая книга"], "bleu", "13a"),
        (["sesoldlihcsdnif", "eulbesuohsnursnur"], "chrf", "13a"),
        (["1 2 3 4 5", "9 9 9 9"], "bleu", "13a"),
        (["iPhone 15 Pro 发布了，我们去看看吧", "今天我用 Python 写程序"], "bleu", "zh"),
        ([""], "chrf", "13a"),
    ],
)
def test_metric_and_tokenizer_follow_the_text(lines: list[str], criterion: str, tokenize: str) -> None:
    choice = choose(lines)
    assert (choice.criterion, choice.tokenize) == (criterion, tokenize)
    assert bleu_tokenizer(lines) == tokenize


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["他去年卖了四千个苹果", "桌子上有三个杯子"], ["他去年卖了四千个汽车", "桌子上有三个台灯"]),
        (["einhundertsiebenunddreißig", "zwölf"], ["einhundertsiebenunddreizig", "zwolf"]),
    ],
)
def test_a_partly_right_output_is_better_than_nothing_by_the_chosen_metric(lines: list[str], wrong: list[str]) -> None:
    """By BLEU with the tokenizer 13a, both outputs would score 0."""
    assert bleu(wrong, lines, "13a").value == 0.0
    choice = choose(lines)
    score = bleu(wrong, lines, choice.tokenize) if choice.criterion == "bleu" else chrf(wrong, lines)
    assert score.value > 20


def test_a_tokenizer_that_is_given_is_kept() -> None:
    choice = choose(["她 买 了 三 本 书", "我 爱 你 们 吧"], "none")
    assert (choice.criterion, choice.tokenize, choice.reason) == ("bleu", "none", "BLEU, tokenizer none")


@pytest.mark.parametrize(
    ("line", "tokenize", "unit"),
    [
        ("two words", "intl", "2 words"),
        ("two words", "none", "2 words"),
        ("eins", "auto", "1 word"),
        ("书", "auto", "1 character"),
        ("苹果", "auto", "2 characters"),
        ("ab", "char", "2 characters"),
    ],
)
def test_the_reason_counts_what_the_tokenizer_counts(line: str, tokenize: str, unit: str) -> None:
    assert choose([line], tokenize).reason == f"chrF: a typical target has {unit}, and BLEU needs 4"


def test_a_long_text_is_sampled_throughout() -> None:
    lines = ["eins"] * 3000 + ["这是一个很长的中文句子而且没有空格"] * 9000
    assert choose(lines).tokenize == "zh"
