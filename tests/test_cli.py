"""The command line, as a person or a script meets it: real processes.

Most are forked from one that has imported the package. Those that are `begun_anew` are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.processes import dualform

EXPLAIN = ("explain", "runs/digits", "--model", "dualform.demo:make_model", "--input")


def begun_anew(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dualform", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, run once."""
    folder = tmp_path_factory.mktemp("demo")
    result = begun_anew("demo", "--epochs", "3", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "100% of trained parameters by row" in result.stdout
    assert "the report is runs/digits.html" in result.stdout
    opens = "--model dualform.demo:make_model --input runs/digits.npz"
    assert f"Explore it with: dualform view runs/digits {opens}" in result.stdout
    assert "In words: the network takes this" in result.stdout
    return folder


def test_demo_leaves_a_run_and_a_report(demo: Path) -> None:
    page = (demo / "runs/digits.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy" in page
    assert page.count("data:image/png") > 50
    assert len(page) < 5_000_000


def test_demo_as_json(tmp_path: Path) -> None:
    result = dualform("demo", "--epochs", "1", "--out", "here/run", "--json", cwd=tmp_path)
    facts = json.loads(result.stdout)
    assert facts["audit"]["remainder"] < 1e-5
    assert (tmp_path / facts["report"]).exists()


def test_info(demo: Path) -> None:
    result = dualform("info", "runs/digits", "--check", cwd=demo)
    assert "Every committed byte is as it was written." in result.stdout
    facts = json.loads(dualform("info", "runs/digits", "--check", "--json", cwd=demo).stdout)
    assert (facts["steps"], facts["samples"], facts["problems"]) == (132, 1400, [])
    assert facts["optimizer"] == "SGD"
    assert facts["settings"][0]["momentum"] == 0.9


def test_info_finds_damage(demo: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(demo / "runs/digits", tmp_path / "run")
    shard = next((tmp_path / "run").glob("writer-*/00000001.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    result = dualform("info", "run", "--check", cwd=tmp_path)
    assert result.returncode == 1
    assert "1 damaged" in result.stderr
    result = dualform("info", "run", "--check", "--json", cwd=tmp_path)
    (problem,) = json.loads(result.stdout)["problems"]
    assert "checksum does not match" in problem


def test_info_names_a_damaged_log(demo: Path, tmp_path: Path) -> None:
    """With and without `--check`, in words and as JSON; what is left is still described."""
    import shutil

    shutil.copytree(demo / "runs/digits", tmp_path / "run")
    log = next((tmp_path / "run").glob("writer-*/commits.jsonl"))
    log.write_bytes(log.read_bytes().replace(b'"kind":"rows"', b'"kind":"rowz"', 1))
    for options in ([], ["--check"], ["--json"]):
        result = dualform("info", "run", *options, cwd=tmp_path)
        assert result.returncode == 1
        assert "is altered: the seal of line 2 does not fit" in result.stderr
        assert "Every committed byte" not in result.stdout
    assert "seal of line 2" in json.loads(result.stdout)["problems"][0]
    result = dualform("audit", "run", cwd=tmp_path)
    assert result.returncode == 1
    assert "is damaged" in result.stderr


def test_audit(demo: Path) -> None:
    assert "0.weight" in dualform("audit", "runs/digits", cwd=demo).stdout
    facts = json.loads(dualform("audit", "runs/digits", "--json", cwd=demo).stdout)
    assert facts["coverage"] == 1.0
    assert facts["remainder"] < 1e-5
    assert {book["granularity"] for book in facts["books"]} == {"row"}


def test_compact(demo: Path, tmp_path: Path) -> None:
    """Smaller, back again, smaller and confirmed; as words and as JSON."""
    import shutil

    shutil.copytree(demo / "runs/digits", tmp_path / "run")
    result = dualform("compact", "run", "--keep", "int8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "compacted to 'int8'" in result.stdout
    assert "the old run is in" in result.stdout
    again = dualform("compact", "run", "--keep", "half", cwd=tmp_path)
    assert again.returncode == 1
    assert "was compacted already" in again.stderr
    assert "as it was" in dualform("compact", "run", "--undo", cwd=tmp_path).stdout
    keep = '{"0": "rows", "*": "int8"}'
    facts = json.loads(dualform("compact", "run", "--keep", keep, "--json", cwd=tmp_path).stdout)
    assert facts["bytes_after"] < facts["bytes_before"]
    assert facts["remainder_after"] < 1e-5
    done = json.loads(dualform("compact", "run", "--confirm", "--json", cwd=tmp_path).stdout)
    assert done["bytes_old"] == facts["bytes_before"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert dualform("info", "run", "--check", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give one of --keep POLICY, --confirm and --undo"),
        (["--keep", "int8", "--undo"], "give one of --keep POLICY"),
        (["--keep", "zip"], "keep='zip' is unknown; there are 'auto', 'rows', 'half'"),
        (["--keep", "{half}"], "--keep {half} is no JSON object"),
        (["--keep", '{"head": "half"}'], "no parameter or module of the model is called so"),
        (["--undo"], "there is nothing to undo"),
    ],
)
def test_compact_refuses(arguments: list[str], problem: str, demo: Path) -> None:
    result = dualform("compact", "runs/digits", *arguments, cwd=demo)
    assert result.returncode in (1, 2)
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


def test_top_of_training_samples(demo: Path) -> None:
    arguments = ("top", "runs/digits", "--sample", "7", "--sample", "8", "-k", "4")
    assert "against" not in dualform(*arguments, cwd=demo).stderr
    facts = json.loads(dualform(*arguments, "--json", cwd=demo).stdout)
    assert facts["layer"] == "2"
    assert len(facts["for"]) == len(facts["against"]) == 8
    for check in facts["check"]:
        explained = check["initial"] + check["evidence"] + check["booked by step"]
        assert explained == pytest.approx(check["total"], rel=1e-5)
        assert explained + check["remainder"] == pytest.approx(check["total"], rel=1e-9)


def test_top_of_a_model_s_inputs(demo: Path) -> None:
    """The same query, given as a model and an input, or as the sample it is: the same answer."""
    from dualform.demo import load_digits

    np.save(demo / "x.npy", load_digits()[0].x[7:8].numpy())
    asked = ("--model", "dualform.demo:make_model", "--input", "x.npy", "--layer", "0", "--json")
    by_model = json.loads(dualform("top", "runs/digits", *asked, cwd=demo).stdout)
    by_sample = json.loads(
        dualform("top", "runs/digits", "--sample", "7", "--layer", "0", "--json", cwd=demo).stdout
    )
    assert [row["id"] for row in by_model["for"]] == [row["id"] for row in by_sample["for"]]
    assert by_model["check"][0]["total"] == pytest.approx(by_sample["check"][0]["total"], rel=1e-6)


def test_report(demo: Path) -> None:
    result = dualform("report", "runs/digits", "-o", "page.html", cwd=demo)
    assert result.stdout == "Wrote page.html\n"
    assert "training sample 0" in (demo / "page.html").read_text(encoding="utf-8")
    asked = ("--sample", "3", "-o", "other.html", "--json")
    assert json.loads(dualform("report", "runs/digits", *asked, cwd=demo).stdout) == {
        "report": "other.html"
    }
    asked = ("--model", "dualform.demo:make_model", "--input", "runs/digits.npz", "--query", "3")
    assert dualform("report", "runs/digits", *asked, "-o", "q.html", cwd=demo).returncode == 0
    assert '"title":"test digit 3"' in (demo / "q.html").read_text(encoding="utf-8")


def test_evaluate_retrain_and_lds(tmp_path: Path) -> None:
    """A task in a module of the user's own folder, its ground truth, and scores held against it."""
    (tmp_path / "mine.py").write_text("def total(ids, seed):\n    return [ids.sum(), -ids.sum()]\n")
    asked = ("evaluate", "retrain", "mine:total", "--samples", "12", "--subsets", "6")
    made = begun_anew(*asked, "--folder", "truth", "--workers", "1", "--json", cwd=tmp_path)
    facts = json.loads(made.stdout)
    assert facts["truth"] == "truth/truth.npz"
    assert (facts["subsets"], facts["seeds"], facts["queries"]) == (6, 3, 2)
    np.savez(tmp_path / "scores.npz", values=np.arange(12.0)[:, None] * [1.0, 1.0])
    compared = ("evaluate", "lds", "scores.npz", "truth/truth.npz")
    found = json.loads(dualform(*compared, "--json", cwd=tmp_path).stdout)
    assert found["per_query"] == pytest.approx([1.0, -1.0])
    assert "LDS" in dualform(*compared, cwd=tmp_path).stdout


def test_evaluate_suspects(demo: Path) -> None:
    asked = ("evaluate", "suspects", "runs/digits", "-k", "3")
    assert "suspicion, largest first" in dualform(*asked, cwd=demo).stdout
    rows = json.loads(dualform(*asked, "--json", cwd=demo).stdout)
    assert [sorted(row) for row in rows] == [["id", "label", "suspicion"]] * 3
    assert rows[0]["suspicion"] >= rows[1]["suspicion"] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("audit", "nothing"), "dualform: 'nothing' is not a dualform run: there is nothing at"),
        (("top", "runs/digits"), "dualform: say what to ask: --sample ID"),
        (("top", "runs/digits", "--sample", "x"), "dualform: sample 'x' is not in this run"),
        (
            ("top", "runs/digits", "--sample", "1", "--layer", "fc9"),
            "dualform: layer 'fc9' is not in this run; it recorded '0', '2'.",
        ),
        (
            ("top", "runs/digits", "--model", "nowhere:f", "--input", "x.npy"),
            "dualform: --model nowhere:f: No module named 'nowhere'",
        ),
        (
            ("top", "runs/digits", "--model", "dualform.demo:make_model"),
            "dualform: --model needs --input x.npy",
        ),
        (
            ("top", "runs/digits", "--model", "dualform.demo:load", "--input", "x.npy"),
            "dualform: --model dualform.demo:load: module 'dualform.demo' has no attribute 'load'",
        ),
        (
            ("evaluate", "retrain", "nowhere:f", "--samples", "9", "--folder", "f"),
            "dualform: TASK nowhere:f: No module named 'nowhere'; expected package.module:function",
        ),
        (("view", "nothing", "--no-browser"), "dualform: 'nothing' is not a dualform run"),
        (
            ("view", "runs/digits", "--model", "dualform.demo:make_model"),
            "dualform: --model and --input go together: the model, and what it is asked.",
        ),
        (
            ("view", "runs/digits", "--host", "no.such.host.example", "--no-browser"),
            "dualform: cannot listen on no.such.host.example port 0:",
        ),
        (
            ("report", "runs/digits", "--query", "3", "-o", "page.html"),
            "dualform: query '3' does not exist; none were given.",
        ),
        (("evaluate", "lds", "no.npy", "no.npz"), "dualform: [Errno 2] No such file or directory"),
        (("evaluate", "suspects", "nothing"), "dualform: 'nothing' is not a dualform run"),
        (
            ("top", "runs/digits", "--model", "dualform.demo:load_digits", "--input", "x.npy"),
            "dualform: --model dualform.demo:load_digits returned a tuple; expected a torch.nn.Mod",
        ),
        (
            ("explain", "runs/digits", "--model", "mine:wider", "--input", "x.npy"),
            "dualform: --model mine:wider is not the recorded model: size mismatch for 0.weight",
        ),
        (
            (*EXPLAIN, "unnamed.npz"),
            "dualform: --input unnamed.npz: it holds 'inputs'; expected an array as .npy, or",
        ),
        (
            (*EXPLAIN, "narrow.npy"),
            "dualform: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x50 and 64x128) "
            "(`dualform --debug …` shows where)",
        ),
    ],
)
def test_errors_are_one_line(demo: Path, arguments: tuple[str, ...], message: str) -> None:
    wider = "from torch.nn import Linear, Sequential\nwider = lambda: Sequential(Linear(64, 129))\n"
    (demo / "mine.py").write_text(wider)
    np.savez(demo / "unnamed.npz", inputs=np.zeros((2, 64)))
    np.save(demo / "narrow.npy", np.zeros((2, 50)))
    result = dualform(*arguments, cwd=demo)
    assert result.returncode == 1
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert "Traceback" in dualform("--debug", *arguments, cwd=demo).stderr


@pytest.fixture(scope="module")
def asked(demo: Path) -> tuple[str, ...]:
    """Two digits, for the demo's model."""
    np.save(demo / "two.npy", np.linspace(0, 1, 128, dtype=np.float32).reshape(2, 64))
    return (*EXPLAIN[1:], "two.npy")


def test_double_numbers_are_taken_in_the_model_s_precision(demo: Path) -> None:
    """numpy writes them unless it is told otherwise."""
    x = np.linspace(0, 1, 64, dtype=np.float32)[None]
    np.save(demo / "single.npy", x)
    np.save(demo / "double.npy", x.astype(float))
    kinds = [dualform(*EXPLAIN, f"{kind}.npy", cwd=demo) for kind in ("single", "double")]
    assert kinds[1].returncode == 0
    assert kinds[0].stdout == kinds[1].stdout


def test_every_verb_is_summed_up_in_one_line(demo: Path) -> None:
    for group in ((), ("evaluate",), ("study",)):
        assert "..." not in dualform(*group, "--help", cwd=demo).stdout.partition("Commands:")[2]


def test_a_demo_whose_name_has_a_point(tmp_path: Path) -> None:
    facts = dualform("demo", "--epochs", "1", "--out", "lr0.05", "--json", cwd=tmp_path).stdout
    assert json.loads(facts)["report"] == "lr0.05.html"
    assert (tmp_path / "lr0.05.npz").is_file()


def test_a_demo_in_a_small_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert "…" not in dualform("demo", "--epochs", "1", cwd=tmp_path).stdout.partition("steps;")[2]


def test_explain(demo: Path, asked: tuple[str, ...]) -> None:
    facts = json.loads(dualform("explain", *asked, "--target", "3", "--json", cwd=demo).stdout)
    assert facts["queries"] == ["0: output 3", "1: output 3"]
    parts = facts["check"][0]
    explained = parts["initial"] + parts["evidence"] + parts["booked by step"]
    assert explained == pytest.approx(parts["total"], rel=2e-3)
    assert explained + parts["remainder"] == pytest.approx(parts["total"], rel=1e-9)
    assert max(facts["completeness"]) <= 1e-3
    assert len(facts["for"]) == len(facts["against"]) == 20
    text = dualform("explain", *asked, "--target", "3", "--target", "5", cwd=demo).stdout
    assert "1: output 5" in text
    assert "integration missed" in text


def test_influence_to_a_file_that_can_be_evaluated(demo: Path, asked: tuple[str, ...]) -> None:
    result = dualform("influence", *asked, "--save", "scores.npz", "-k", "2", cwd=demo)
    assert "an estimate of what leaving a sample out would take away" in result.stdout
    assert np.load(demo / "scores.npz")["values"].shape == (1400, 2)
    facts = json.loads(
        dualform("influence", *asked, "--method", "fisher", "--json", cwd=demo).stdout
    )
    assert (facts["method"], facts["damping"], facts["kept"]) == ("fisher", 1.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--damping", "0"), "damping=0.0: what is inverted must be damped by more than 0"),
        (("--method", "magic"), "method='magic' is not known; there are 'ridge', 'fisher'"),
        (("--target", "10"), "the model has outputs 0 to 9"),
        (("--rank", "0"), "rank=0: keep at least one direction"),
    ],
)
def test_influence_is_asked_wrongly(
    demo: Path, asked: tuple[str, ...], arguments: tuple[str, ...], message: str
) -> None:
    result = dualform("influence", *asked, *arguments, cwd=demo)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_plan(tmp_path: Path) -> None:
    """A function that gives model and batch; errors say what to do.

    What else may be given, and how much is planned: tests/recording/test_plan.py.
    """
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def model():\n    return torch.nn.Linear(8, 3)\n"
        "def both():\n    return model(), torch.ones(4, 8)\n"
    )
    asked = ("plan", "--model", "mine:both", "--steps", "100", "--optimizer", "SGD")
    result = dualform(*asked, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "what recording 100 steps takes" in result.stdout
    assert "│ summaries │" in result.stdout  # nothing is cut off
    assert "keep='rows': all rows of a step take" in result.stdout
    result = dualform("plan", "--model", "mine:model", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert "returned a Linear; expected a torch.nn.Module with --input x.npy, or" in result.stderr
    result = dualform("plan", "--model", "mine:both", "--optimizer", "Sgd", cwd=tmp_path)
    assert "--optimizer Sgd is not in torch.optim; it has ASGD, Adadelta" in result.stderr
