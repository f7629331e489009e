"""The output and the exit codes of the command line."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from regard import __version__, cli
from regard.cli import base

BROKEN_NORM = """
from dataclasses import dataclass
import torch
from torch import nn
from regard.nn.norm import Norm

@dataclass(frozen=True, slots=True)
class Leaky(Norm):
    \"\"\"x - mean over the row: depends on neighbouring tokens.\"\"\"
    kind = "leaky"
    def build(self, site, width=None):
        return _Leaky()

class _Leaky(nn.Module):
    def forward(self, x):
        return x - x.mean(-2, keepdim=True)

@dataclass(frozen=True, slots=True)
class Needy(Norm):
    kind = "needy"
    size: int

good = __import__("regard.nn.rms_norm", fromlist=["x"]).RMSNorm()
"""


CONCATENATED = 'input={kind="tokens", join="concat", position_width=8}'


def regard(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, where torch is already loaded, and return its output and exit code."""
    out, err = io.StringIO(), io.StringIO()
    here = Path.cwd()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["regard", *words])
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "100")
        patch.chdir(cwd or here)
        sys.modules.pop("mine", None)
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        signal.signal(signal.SIGINT, handler)
    return subprocess.CompletedProcess(words, int(exit_info.value.code or 0), out.getvalue(), err.getvalue())


def process(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process, and return its output and exit code."""
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "regard", *words], capture_output=True, text=True, check=False, env=env
    )


def error_message(*words: str, cwd: Path | None = None) -> str:
    """Run a command that must fail, and return its error message, which must be one sentence."""
    run = regard(*words, cwd=cwd)
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stdout == ""
    assert run.stderr.startswith("regard: ")
    assert run.stderr.count("\n") == 1
    assert "Traceback" not in run.stderr
    return run.stderr.removeprefix("regard: ").strip()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("t5_base", 222903552), ("gpt2_small", 124439808), ("bert_base", 109482240), ("narang_base", 223043328)],
)
def test_show_counts_parameters_exactly(name: str, parameters: int) -> None:
    run = regard("show", name, "--json")
    result = json.loads(run.stdout)
    assert run.returncode == 0
    assert result["parameters"] == parameters
    assert result["parameters"] == sum(part["parameters"] for part in result["parts"])
    assert result["flops_per_token"] == pytest.approx(sum(part["flops_per_token"] for part in result["parts"]))
    assert result["changes"] == []


def test_show_applies_changes_together_and_lists_them() -> None:
    run = regard("show", "transformer_tiny", "--set", "heads=6", "--set", "model.d_model=96", "--json")
    result = json.loads(run.stdout)
    assert {change["path"]: change["after"] for change in result["changes"]} == {"heads": 6, "d_model": 96}
    assert result["model"]["d_model"] == 96


def test_show_takes_kinds_and_tables_as_values() -> None:
    run = regard(
        "show",
        "transformer_tiny",
        "--set",
        "encoder.position=rotary",
        "--set",
        'encoder.pattern[0].residual={kind="pre_norm", norm="rms_norm"}',
        "--json",
    )
    model = json.loads(run.stdout)["model"]
    assert model["encoder"]["position"]["kind"] == "rotary"
    assert model["encoder"]["pattern"][0]["residual"]["norm"]["kind"] == "rms_norm"


def test_show_prints_a_tree_and_the_changes() -> None:
    run = regard("show", "transformer_tiny", "--set", "decoder.depth=2")
    assert run.returncode == 0
    for text in ("decoder  plain", "decoder.depth: 4 -> 2", "decoder.cross_attention", "parameters"):
        assert text in run.stdout


def test_show_lists_presets() -> None:
    assert "narang_base" in regard("show").stdout
    assert "narang_base" in json.loads(regard("show", "--json").stdout)


def test_show_reads_recipes(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[model]\npreset = "transformer_tiny"\nvocab = 500\ndecoder = { depth = 1 }\n')
    result = json.loads(regard("show", str(recipe), "--set", "heads=2", "--json").stdout)
    after = {change["path"]: change["after"] for change in result["changes"]}
    assert after == {"vocab": 500, "decoder.depth": 1, "heads": 2}
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"model": result["model"]}))
    assert json.loads(regard("show", str(whole), "--json").stdout)["parameters"] == result["parameters"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "t5_bas"], "unknown preset 't5_bas'; did you mean 't5_base'?"),
        (["show", "t5_base", "--set", "decoder.dept=3"], "decoder.dept: unknown key 'dept' in 'plain'; did you mean"),
        (["show", "t5_base", "--set", "decoder.depth=three"], "decoder.depth: needs a whole number, not 'three' (str)"),
        (["show", "t5_base", "--set", "heads=7", "--set", "d_head=none"], "heads: 7 heads do not divide d_model 768"),
        (["show", "t5_base", "--set", "decoder.pattern[3].residual=post_norm"], "decoder.pattern[3]: there are only 1"),
        (["show", "t5_base", "--set", "encoder.pattern[0].residual=post_nrm"], "did you mean 'post_norm'?"),
        (["show", "t5_base", "--set", "head=rotary"], "'rotary' is not a HeadSpec"),
        (["show", "t5_base", "--set", "depth"], "--set: 'depth' is not path=value"),
        (["show", "transformer_tiny", "--set", CONCATENATED], "sharing: the output table is 10000 x 128"),
        (["show", "missing.toml"], "cannot read missing.toml: No such file or directory"),
        (["check", "no_such_module:Norm"], "cannot import 'no_such_module'"),
        (["check", "regard.nn.norm:LayerNorms"], "did you mean 'LayerNorm'?"),
        (["check", "rotory"], "did you mean 'rotary'?"),
        (["check", ":Norm"], "cannot import ''"),
        (["show", "t5_base", "--set", "decoder..depth=3"], "decoder..depth: is not a path"),
        (["show", "transformer_tiny", "--set", "input.position.base=0"], "input.position.base: must be above 1"),
        (["show", "t5_base", "--set", "vocab=1000000000000000000"], "vocab: must lie between 1 and 2^31"),
        (["show", "t5_base", "--set", "init=undrawn"], "init: 'uninitialized' leaves the weights uninitialised"),
        (["show", "gpt2_small", "--length", "2000"], "input.position.max_len: a sequence of 2000 tokens"),
        (["check", "rms_norm", "--law", "causalty"], "law: unknown law 'causalty'; did you mean 'causality'?"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(words: list[str], message: str) -> None:
    assert message in error_message(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3", "model: needs a table with a kind"),
        ("[modle]\n", "modle: unknown key 'modle'"),
        ("x =", "is not valid TOML"),
        ('model = { preset = "t5_base", hedas = 4 }', "model.hedas: unknown key 'hedas' in"),
        ('model = { kind = "encoder_decoder", init = { kind = "os:system" } }', "add --trust-code if you trust it"),
        ('model = { kind = "encoder_decoder", dropout = "high" }', "model.dropout: needs a number"),
        ('model = { preset = "t5_base", typo = {} }', "model.typo: unknown key 'typo'"),
    ],
)  # fmt: skip
def test_bad_recipes_are_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    assert message in error_message("show", "bad.toml", cwd=tmp_path)


def test_usage_errors_exit_with_2_too() -> None:
    for words in (["shwo"], ["show", "--jsn"], ["check"], ["show", "t5_base", "--length", "0"]):
        run = process(*words)
        assert run.returncode == 2
        assert "Traceback" not in run.stderr


def test_check_reports_broken_laws(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN_NORM)
    laws = [word for law in ("causality", "batch", "records") for word in ("--law", law)]
    run = regard("check", "mine:Leaky", *laws, cwd=tmp_path)
    assert run.returncode == 1
    assert "causality in decoder_only" in run.stdout
    report = json.loads(regard("check", "mine:Leaky", *laws, "--json", cwd=tmp_path).stdout)
    outcomes = {(v["model"], v["law"]): v["outcome"] for v in report["verdicts"]}
    assert outcomes["decoder_only", "causality"] == "broken"
    assert outcomes["decoder_only", "records"] == "kept"
    assert outcomes["masked_lm", "causality"] == "not applicable"
    assert report["broken"] == sum(outcome == "broken" for outcome in outcomes.values())


def test_check_accepts_instances_and_kinds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN_NORM)
    assert regard("check", "mine:good", "--law", "padding", cwd=tmp_path).returncode == 0
    assert regard("check", "rotary", "--law", "steps").returncode == 0
    assert "Needy needs size" in error_message("check", "mine:Needy", cwd=tmp_path)


def test_set_imports_code_only_with_trust_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN_NORM)
    change = ["--set", 'encoder.pattern[0].residual.norm="mine:Leaky"']
    assert "add --trust-code" in error_message("show", "transformer_tiny", *change, cwd=tmp_path)
    run = regard("show", "transformer_tiny", *change, "--trust-code", "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    norm = json.loads(run.stdout)["model"]["encoder"]["pattern"][0]["residual"]["norm"]
    assert norm == {"kind": "mine:Leaky"}


def test_import_errors_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "raises.py").write_text("raise RuntimeError('no')")
    assert "cannot import 'broken': SyntaxError" in error_message("check", "broken:X", cwd=tmp_path)
    assert "cannot import 'raises': RuntimeError: no" in error_message("check", "raises:X", cwd=tmp_path)


def test_version_and_help() -> None:
    assert process("--version").stdout == f"regard {__version__}\n"
    for words in ([], ["show"], ["check"], ["demo"]):
        run = process(*words, "--help")
        assert run.returncode == 0
        assert "Usage" in run.stdout
        assert "\x1b[" not in run.stdout


def test_help_of_check_has_a_line_for_every_law() -> None:
    lines = [line.strip(" │").split(maxsplit=1) for line in process("check", "--help").stdout.splitlines()]
    from regard.testing import LAWS

    assert [words[0] for words in lines if len(words) == 2 and words[0] in LAWS] == list(LAWS)


def test_trusted_code_does_not_shadow_installed_modules(tmp_path: Path) -> None:
    """A file in the folder of the user's module does not replace a library of the same name."""
    (tmp_path / "mine.py").write_text(f"import colorsys\n{BROKEN_NORM}")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('not the library')")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "colorsys", raising=False)
        patch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
        run = regard("check", "mine:Leaky", "--law", "records", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ("encoder.depth=1000000000", "encoder.depth"),
        ("heads=1000000000", "heads"),
        ("decoder.pattern[0].branches[0].heads=1000000000", "decoder.pattern[0].branches[0].heads"),
        ('head={kind="mixture_of_softmaxes",components=1000000000}', "head.components"),
        ("encoder.pattern[0].branches[1].d_hidden=100000000000000000", "memory"),
    ],
)
def test_sizes_that_no_machine_could_build_are_refused_at_once(change: str, path: str) -> None:
    message = error_message("show", "transformer_base", "--set", change)
    assert path in message
    assert "Traceback" not in message


def test_help_does_not_import_torch() -> None:
    program = "import sys; import regard.cli; assert 'torch' not in sys.modules and 'rich.tree' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_ctrl_c_exits_with_130() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", "demo", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # the first line is printed just before training starts
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "regard: interrupted\n"


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m regard show t5_base --json | head -n 1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert run.stdout == "{\n"
    assert run.stderr == ""


def test_a_closed_standard_output_gives_no_traceback() -> None:
    command = f"{sys.executable} -m regard --version >&-"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_variants_lists_the_whole_table() -> None:
    result = regard("variants", "--json")
    assert result.returncode == 0
    listed = json.loads(result.stdout)
    rows = {row["row"]: row for row in listed["variants"] if row["row"] is not None}
    assert set(rows) == set(range(1, 53))
    assert (rows[1]["parameters"], rows[14]["name"], rows[14]["parameters"]) == (223_043_328, "rezero", 222_948_156)
    assert all(row["parameters"] and row["about"] and row["paper"] for row in rows.values())
    assert all(row["changes"] for number, row in rows.items() if number != 1)


def test_variants_of_a_group_and_by_name() -> None:
    result = regard("variants", "--group", "norm")
    assert result.returncode == 0
    assert "rms_norm_full" in result.stdout
    assert "swiglu" not in result.stdout
    result = regard("variants", "swiglu", "--base", "transformer_small")
    assert "encoder.pattern[0].branches[1]" in result.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["swigul"], "rows: unknown variant 'swigul'; did you mean 'swiglu'?"),
        (["--group", "nrom"], "group: unknown group 'nrom'; did you mean 'norm'?"),
        (["--base", "narang"], "unknown preset 'narang'"),
    ],
)
def test_errors_of_variants_are_one_sentence(words: list[str], sentence: str) -> None:
    result = regard("variants", *words)
    assert result.returncode == 2
    assert result.stderr.startswith(f"regard: {sentence}")


def test_options_named_like_their_metavar_have_explicit_names() -> None:
    """typer 0.27 calls an option --ROWS if its metavar is ROWS and its parameter is rows, unless a name is given."""
    import typer

    from regard.cli.base import app

    group: Any = typer.main.get_command(app)
    options = [p for command in group.commands.values() for p in command.params if p.param_type_name == "option"]
    same = {option.name for option in options if option.metavar and option.metavar.lower() == option.name}
    assert same == {"rows", "rungs", "group", "kind", "time"}, "name the option: typer.Option('--rows', metavar='ROWS')"
    assert {"--rows", "--rungs", "--group", "--kind"} <= {name for option in options for name in option.opts}


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (SystemExit("no terminal"), 1, "regard: no terminal\n"),
        (SystemExit(None), 0, ""),
        (SystemExit(3), 3, ""),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 2, "regard: memory ran out"),
        (OSError(errno.ENOSPC, "No space left"), 2, "regard: the output: cannot be read or written (No space left)"),
    ],
    ids=repr,
)
def test_exceptions_set_the_exit_code_and_the_message(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, sentence: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(base, "app", fail)
    result = regard("show")
    assert result.returncode == code
    assert result.stderr.startswith(sentence)
    assert bool(result.stderr) == bool(sentence)
