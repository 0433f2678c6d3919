"""The commands from start to end on a tiny model that answers by a script, on plain torch."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.checkpoints import EOS, ScriptedModel, make_script
from treadle import cli

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--page-size", "16", "--max-rows", "4", "--max-step-tokens", "64", "--target", "reference"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ScriptedModel:
    scripts = {"[[S1]]": ["one", " river", EOS], "[[S2]]": ["two", " rivers", EOS]}
    return make_script(tmp_path_factory.mktemp("scripted") / "model", scripts)


@pytest.fixture(scope="module")
def artifact(model: ScriptedModel) -> str:
    out = str(model.path.with_name("artifact"))
    assert cli.run(["compile", str(model.path), "-o", out, *SIZES]) == 0
    return out


def test_compile_says_first_where_the_result_goes(
    model: ScriptedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "made")
    assert cli.run(["compile", str(model.path), "-o", out, *SIZES]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == f"output: {out}"
    assert f" generate {out} " in captured.out


def test_compile_in_json_is_nothing_but_json(
    model: ScriptedModel, artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["compile", str(model.path), "-o", artifact, *SIZES, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["artifact"], found["was_current"]) == (artifact, True)
    assert found["manifest"]["target"] == "reference"


def test_compile_dumps_the_passes(model: ScriptedModel, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    arguments = ["compile", str(model.path), "-o", str(tmp_path / "made"), *SIZES]
    assert cli.run([*arguments, "--dump", str(dump)]) == 0
    assert (dump / "decode.00_authored.ir").read_text().startswith("graph ")


def test_generate_streams_one_answer_to_stdout(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", artifact, "[[S1]]"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "one river\n"
    assert "tokens/s, ended by stop]" in captured.err


def test_generate_prints_several_answers_in_their_order(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", artifact, "--json", "[[S2]]", "[[S1]]"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["prompt"], record["text"]) for record in records] == [
        ("[[S2]]", "two rivers"),
        ("[[S1]]", "one river"),
    ]
    assert records[0]["finish_reason"] == "stop"
    assert records[0]["usage"]["completion_tokens"] == 3


def test_generate_reads_a_prompt_from_stdin(
    artifact: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[[S2]]"))
    assert cli.run(["generate", artifact, "-"]) == 0
    assert capsys.readouterr().out == "two rivers\n"


def test_generate_ends_after_max_tokens(artifact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", artifact, "[[S1]]", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out == "one\n"


def test_generate_ends_before_a_stop_string(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", artifact, "[[S1]]", "--stop", "river"]) == 0
    assert capsys.readouterr().out == "one \n"


def test_raw_goes_on_with_the_prompt(artifact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", artifact, "--raw", "--json", "[[S1]]"]) == 0
    record = json.loads(capsys.readouterr().out)
    # The cue and at most one token that begins a text: no roles of a chat around it.
    assert record["usage"]["prompt_tokens"] <= 2
    assert record["text"] == "one river"


def test_a_model_is_compiled_into_the_cache(
    model: ScriptedModel, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", str(model.path), "[[S1]]", "--target", "reference"]) == 0
    assert capsys.readouterr().out == "one river\n"
    assert len(list(cache_dir.glob("artifacts/*/manifest.json"))) == 1


def test_an_artifact_of_another_target_is_refused(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", artifact, "x", "--target", "cuda"]) == 2
    assert "is for `reference`" in capsys.readouterr().err


def test_a_sampling_value_out_of_range_is_named(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", artifact, "x", "--top-p", "2"]) == 1
    assert "`top_p`" in capsys.readouterr().err


def test_chat_answers_each_line_and_ends_with_the_input(
    artifact: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[[S1]]\n\n[[S2]]\n"))
    assert cli.run(["chat", artifact]) == 0
    captured = capsys.readouterr()
    assert captured.out == "one river\ntwo rivers\n"
    assert "of 128 tokens of context used]" in captured.err


def test_chat_shows_the_raw_prompt(
    artifact: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[[S1]]\n/raw\n/exit\n[[S2]]\n"))
    assert cli.run(["chat", artifact, "--system", "be brief"]) == 0
    raw = capsys.readouterr().out.removeprefix("one river\n")
    assert "<|system|>be brief<|user|>[[S1]]<|assistant|>one river" in raw
    assert "two" not in raw


def test_chat_goes_on_after_a_prompt_that_is_too_long(
    artifact: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 500 + "\n[[S1]]\n"))
    assert cli.run(["chat", artifact]) == 0
    captured = capsys.readouterr()
    assert captured.out == "one river\n"
    assert "window" in captured.err


def test_chat_forgets_after_reset(
    artifact: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[[S1]]\n/reset\n[[S2]]\n/raw\n"))
    assert cli.run(["chat", artifact]) == 0
    assert "[[S1]]" not in capsys.readouterr().out


class Interrupting(io.StringIO):
    """Stdout that presses Ctrl-C while the first piece of an answer is written."""

    pressed = False

    def write(self, text: str) -> int:
        if not self.pressed and "again" in text:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Whoever starts the tests in the background may have told them to ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    scripts = {"[[S1]]": ["again"], "[[S2]]": ["two", EOS]}
    endless = make_script(tmp_path / "model", scripts, window=4096)
    out = str(tmp_path / "artifact")
    assert cli.run(["compile", str(endless.path), "-o", out, *SIZES]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("[[S1]]\n[[S2]]\n"))
    stdout = Interrupting()
    monkeypatch.setattr("sys.stdout", stdout)
    assert cli.run(["chat", out]) == 0
    first, second = stdout.getvalue().splitlines()
    assert first.endswith(" [stopped]")
    assert second == "two"


def test_show_prints_the_authored_graph(
    model: ScriptedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["show", str(model.path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("graph ")
    assert "fused" not in text


def test_show_prints_the_fused_graph_of_an_artifact(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["show", artifact, "--fused", "--step", "mixed"]) == 0
    shown = capsys.readouterr().out
    assert shown == (Path(artifact) / "graph/mixed.ir").read_text()


def test_show_lists_the_weights_with_their_tensors(
    model: ScriptedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["show", str(model.path), "--weights"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("weight @") for line in lines)
    assert any("model.embed_tokens.weight" in line for line in lines)


def test_show_lists_the_plan_of_an_artifact(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["show", artifact, "--plan"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "up", "to", "form", "launches"]
    assert {row.split()[0] for row in rows} == {"decode", "mixed"}


@pytest.mark.parametrize("option", [["--plan"], ["--kernel", "norm"]])
def test_show_needs_an_artifact_for_what_was_compiled(
    model: ScriptedModel, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["show", str(model.path), *option]) == 1
    assert f" compile {model.path} -o" in capsys.readouterr().err


def test_show_names_the_kernels_where_one_is_unknown(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["show", artifact, "--kernel", "weave"]) == 1
    assert "no kernel `weave`" in capsys.readouterr().err


def test_the_mixed_step_has_no_form_for_few_tokens(
    model: ScriptedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["show", str(model.path), "--step", "mixed", "--few-tokens"]) == 2
    assert "--step decode" in capsys.readouterr().err


def test_explain_counts_what_ops_became(
    model: ScriptedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["explain", str(model.path)]) == 0
    assert "authored ops became" in capsys.readouterr().out


def test_explain_follows_one_op(model: ScriptedModel, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["show", str(model.path)])
    ops = [line for line in capsys.readouterr().out.splitlines() if " = rms_norm(" in line]
    name = ops[0].split(":")[0].strip()
    assert cli.run(["explain", str(model.path), "--op", name]) == 0
    shown = capsys.readouterr().out
    assert "authored at " in shown
    assert "became:" in shown


def test_explain_of_an_unknown_op_says_how_to_list_them(
    model: ScriptedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["explain", str(model.path), "--op", "shuttle"]) == 1
    assert " show MODEL` lists them" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compile", "generate", "chat", "show", "explain", "serve"])
def test_a_model_that_is_not_there_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    missing = str(tmp_path / "nowhere")
    more = {"compile": ["-o", str(tmp_path / "out")], "generate": ["x"]}.get(command, [])
    assert cli.run([command, missing, *more]) == 1
    captured = capsys.readouterr()
    assert (missing in captured.err, "Traceback" in captured.err) == (True, False)


def test_serve_refuses_two_sizes_of_the_cache(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", artifact, "--kv-memory", "1MiB", "--num-pages", "8"]) == 2
    assert "--num-pages" in capsys.readouterr().err


def test_serve_refuses_host_memory_without_the_prefix_cache(
    artifact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["serve", artifact, "--kv-host-memory", "1MiB", "--no-prefix-cache"]
    assert cli.run(asked) == 2
    assert "--no-prefix-cache" in capsys.readouterr().err


def test_serve_says_where_it_listens_and_ends_with_zero(artifact: str) -> None:
    # As an operator runs it: a process of its own, a free port, SIGTERM at the end.
    command = [sys.executable, str(ROOT / "cli.py"), "serve", artifact, "--port", "0"]
    child = subprocess.Popen(
        [*command, "--num-pages", "32", "--kv-host-memory", "1MiB"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    try:
        lines: list[str] = []
        for line in child.stdout:
            lines.append(line)
            if line.startswith("ready "):
                break
        found = re.search(r"^listening at (http://127\.0\.0\.1:\d+);", lines[0])
        assert found, lines
        assert any("32 pages" in line for line in lines)
        assert any(line.startswith("KV host memory  1 MiB = ") for line in lines)
        with urllib.request.urlopen(f"{found[1]}/v1/models") as answer:
            assert json.load(answer)["data"][0]["max_model_len"] == 128
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
