import re
from pathlib import Path

import pytest

from regard.doctor.case import Case
from regard.doctor.finding import Finding, Report, Skipped, counted, numbered, quoted, share
from regard.doctor.page import html, write_page
from regard.errors import DataError
from regard.runs.request import request_from_options


@pytest.fixture
def case(tmp_path: Path) -> Case:
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(f"text {i}\n" for i in range(30)))
    return Case.of(request_from_options(source=tmp_path / "a", target=tmp_path / "b"))


def test_the_page_escapes_text_and_loads_nothing(case: Case) -> None:
    report = Report("<script>alert(1)</script>")
    report.add("markup", [Finding("markup", "warning", "<b>bold</b>", ("<i>",), "a & b")])
    report.add("encoding", [])
    report.skipped.append(Skipped("language", "<none>"))
    page = html(report, case)
    assert "<script" not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "a &amp; b" in page
    assert "Nothing was found by: encoding" in page
    assert not re.search(r"""(src|href)=["']http""", page)
    assert "<svg" in page


def test_a_page_that_cannot_be_written_is_one_sentence(case: Case, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--page"):
        write_page(tmp_path / "none" / "x.html", Report("x"), case)


def test_reports_list_the_worst_first_and_count() -> None:
    report = Report("x")
    report.add("a", [Finding("a", "note", "n"), Finding("a", "error", "e")])
    report.add("b", [Finding("b", "warning", "w")])
    report.add("c", [])
    assert [finding.level for finding in report.worst_first] == ["error", "warning", "note"]
    record = report.record()
    assert (record["errors"], record["warnings"], record["notes"], record["healthy"]) == (1, 1, 1, False)
    assert record["passed"] == ["c"]


def test_numbers_and_quotations_are_readable() -> None:
    assert share(1, 29_000) == "0.0034 %"
    assert share(1, 4) == "25 %"
    assert share(0, 0) == "0 %"
    assert numbered([3]) == "line 3"
    assert numbered(range(1, 12), 3) == "lines 1, 2, 3 and 8 more"
    assert quoted("a\tb\u200b") == '"a\\tb\\u200b"'
    assert len(quoted("x" * 100)) == 62
    assert counted(1, "source") == "1 source text is"
    assert counted(2, "text", "has have") == "2 texts have"
