"""How modules load: each one alone, the lower layers without torch, the command line lightly.

In fresh processes throughout: what this test process has imported must not hide anything.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .checkpoints import make_llama
from .server import tiny

ROOT = Path(__file__).resolve().parents[1]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

HEAVY = ["torch", "triton", "transformers", "numpy", "aiohttp"]
# transformers loads its parts when they are first used: these, or each module would load them.
PARTS = ["transformers.models.auto.tokenization_auto", "safetensors.torch", "gguf"]

# One process imports the libraries once and forks per module, so that each module starts from
# nothing of ours; a fresh interpreter for each would take minutes.
IMPORT_EACH_ALONE = """
import importlib, json, os, sys, traceback
libraries, modules = (text.split() for text in sys.argv[1:])
for library in libraries:
    importlib.import_module(library)
failures = {}
for module in modules:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            importlib.import_module(module)
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text[-4000:].encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if text or status:
        failures[module] = text or f"the import ended the process, status {status}"
print(json.dumps(failures))
"""


def import_each_alone(
    run_python: RunPython, libraries: list[str], modules: list[str], *switches: str
) -> str:
    """Import each module in a process of its own; give the failures, or nothing."""
    # The interpreter, as in the rest of the tests: without it some modules want a GPU's driver.
    done = run_python(
        *switches,
        "-c",
        IMPORT_EACH_ALONE,
        " ".join(libraries),
        " ".join(modules),
        timeout_s=600,
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stderr
    failures = json.loads(done.stdout.splitlines()[-1])
    return "\n".join(f"{module}:\n{text}" for module, text in failures.items())


def modules_of(*folders: str) -> list[str]:
    return [
        "treadle." + path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "templates" not in path.parts
    ]


ALL_LAYERS = ("ir", "kernels", "models", "runtime", "server", "bench")


def test_every_module_imports(run_python: RunPython) -> None:
    code = "\n".join(f"import {module}" for module in [*modules_of(*ALL_LAYERS), "treadle.cli"])
    done = run_python("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # that no imports form a cycle is seen in the source: see test_layers.py
def test_each_module_imports_alone(run_python: RunPython) -> None:
    modules = modules_of(*ALL_LAYERS)
    assert import_each_alone(run_python, [*HEAVY, *PARTS], [*modules, "treadle.cli"]) == ""


def test_the_lower_layers_need_the_standard_library_only(run_python: RunPython) -> None:
    # `-S` leaves site-packages out: nothing that is installed can be imported.
    assert import_each_alone(run_python, [], modules_of("ir", "models"), "-S") == ""


def test_without_site_packages_torch_is_not_found(run_python: RunPython) -> None:
    # The test above can fail.
    assert "No module named 'torch'" in import_each_alone(run_python, [], ["torch"], "-S")


def test_a_module_that_fails_is_named(run_python: RunPython, tmp_path: Path) -> None:
    found = import_each_alone(run_python, [], ["treadle.ir.dims", "treadle.ir.absent"])
    assert found.startswith("treadle.ir.absent:\n")
    assert "treadle.ir.dims" not in found


def test_the_command_line_imports_nothing_heavy(run_python: RunPython) -> None:
    code = f"import treadle.cli, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = run_python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_serving_imports_no_grammar_library(run_python: RunPython) -> None:
    # It comes as a binary that not every machine has, and only answers of a given form need it.
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "import treadle.runtime.loading, treadle.runtime.pipeline, treadle.server.commands"
    )
    done = run_python("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


# None of these has a part in serving, and each takes its time: no import of ours may bring them in.
# (torch brings in `torch.distributed` and `torch.export` itself.)
NEVER = ["torch._dynamo", "torch._inductor", "torch.onnx", "torchvision", "sympy", "llguidance"]
NEVER += ["openai", "treadle.runtime.tuner", "treadle.runtime.verify"]
# transformers is for the tokenizer alone, which loads beside the weights.
BEFORE_WEIGHTS = ["transformers", "huggingface_hub", *NEVER]
TELL = "print([name for name in {names} if name in sys.modules])"


def small_artifact(folder: Path, run_python: RunPython) -> list[str]:
    """Compile a small model, and give the arguments that do it."""
    model = make_llama(folder / "model", num_layers=1)
    tiny.save_byte_level(model)
    words = ["compile", str(model), "-o", str(folder / "artifact"), "--target", "reference"]
    done = run_python(str(ROOT / "cli.py"), *words)
    assert done.returncode == 0, done.stderr
    return words


def test_compiling_what_is_current_imports_nothing_heavy(
    run_python: RunPython, tmp_path: Path
) -> None:
    words = small_artifact(tmp_path, run_python)
    heavy = [name for name in [*HEAVY, *BEFORE_WEIGHTS, "asyncio"] if name != "numpy"]  # GGUF's
    tell = TELL.format(names=heavy)
    done = run_python("-c", f"import sys; from treadle import cli; cli.run({words}); {tell}")
    assert done.returncode == 0, done.stderr
    assert "(was current)" in done.stdout and done.stdout.splitlines()[-1] == "[]"


def test_serving_imports_transformers_with_the_weights_and_never_what_it_does_not_need(
    run_python: RunPython, tmp_path: Path
) -> None:
    small_artifact(tmp_path, run_python)
    path = str(tmp_path / "artifact")
    code = (
        "import sys, pathlib; import treadle.server.commands\n"
        f"{TELL.format(names=BEFORE_WEIGHTS)}\n"
        "from treadle.runtime.loading import ServeOptions, load_model\n"
        f"load_model(pathlib.Path({path!r}), ServeOptions())\n"
        f"{TELL.format(names=[*NEVER, 'transformers'])}"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "['transformers']"]


def test_a_module_that_is_not_to_be_imported_is_told(run_python: RunPython) -> None:
    # The two tests above can fail.
    names = ["sympy", "torch._dynamo", "transformers"]
    done = run_python("-c", f"import sys, sympy, torch._dynamo; {TELL.format(names=names)}")
    assert done.stdout.strip() == "['sympy', 'torch._dynamo']", done.stderr


# Says which `kernels` an import would find: the library of that name must win over our folder.
FIND_KERNELS = """
import importlib.util
spec = importlib.util.find_spec("kernels")
print(None if spec is None else spec.origin or list(spec.submodule_search_locations))
"""


def is_not_ours(found: str) -> bool:
    return found.strip() == "None" or str(ROOT / "kernels") not in found


def test_kernels_is_not_ours_after_importing_the_command_line(run_python: RunPython) -> None:
    done = run_python("-c", "import treadle.cli" + FIND_KERNELS, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    assert is_not_ours(done.stdout)


@pytest.mark.parametrize("safe_path", [None, "1"])
def test_kernels_is_not_ours_when_the_file_is_run(
    run_python: RunPython, safe_path: str | None
) -> None:
    # As `python cli.py` does, from the root, with the root on the path and nothing installed.
    code = f"import runpy; runpy.run_path({str(ROOT / 'cli.py')!r}, run_name='__mp_main__')"
    done = run_python(
        "-c", code + FIND_KERNELS, cwd=ROOT, PYTHONPATH=str(ROOT), PYTHONSAFEPATH=safe_path
    )
    assert done.returncode == 0, done.stderr
    assert is_not_ours(done.stdout)


@pytest.mark.parametrize("link", [False, True])
def test_the_file_runs_from_any_folder_without_installation(
    run_python: RunPython, tmp_path: Path, link: bool
) -> None:
    script = ROOT / (".import/treadle/cli.py" if link else "cli.py")
    done = run_python(str(script), "--version", cwd=tmp_path, PYTHONPATH=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("treadle ")


def test_a_spawned_child_imports_the_project(run_python: RunPython, tmp_path: Path) -> None:
    # multiprocessing's spawn runs the parent's main file again under another name.
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, runpy, sys\n"
        f"runpy.run_path({str(ROOT / 'cli.py')!r}, run_name='__mp_main__')\n"
        "from treadle.ir import dims\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(str, (dims.Sym('T'),)))\n"
    )
    done = run_python(str(script), cwd=ROOT, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, "T\n"), done.stderr


def test_the_package_imports_nothing_heavy_and_exports_the_pipeline(run_python: RunPython) -> None:
    code = (
        f"import treadle, sys; print([name for name in {HEAVY} if name in sys.modules])\n"
        "from treadle import EngineConfig, GenerationConfig, Response\n"
        "print('torch' in sys.modules, 'pipeline' in dir(treadle))\n"
        "from treadle import pipeline\n"
        "print(pipeline.__module__)\n"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n") == ["[]", "False True", "treadle.runtime.pipeline", ""]


def test_an_unknown_name_of_the_package_is_an_attribute_error(run_python: RunPython) -> None:
    done = run_python("-c", "import treadle; treadle.pipelin")
    assert "has no attribute 'pipelin'" in done.stderr
