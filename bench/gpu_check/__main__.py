"""``python -m bench.gpu_check OUT``: build, run every part, write the summaries."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu_check import outputs, summary
from bench.gpu_check.run import Finding, Outcome, Output, Part, run_stages

BUDGET = 465.0  # seconds, for all
SANITIZERS = {
    # Which of CUDA's calls torch tries in vain is no concern of ours.
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}

_ROOT = Path(__file__).parents[2]
_BUILD = _ROOT / "build" / "gpu_check"
_PYTHON = sys.executable
# Where CUDA's tools are, if not on PATH.
_TOOLS = ("usr/local/cuda/bin", "opt/nvidia/nsight-compute/*")


def main(argv: Sequence[str] | None = None) -> int:
    """Check everything on the GPU at hand; 1 where the build or a test failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="bench/gpu_check.sh", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for at most 8 files")
    out = parser.parse_args(argv).out
    began = time.monotonic()
    try:
        import torch  # the first time, and the GPU's, may take half a minute
    except ModuleNotFoundError:
        print("no GPU: torch is missing")
        return 2
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} finds none")
        return 2
    tools = [str(path) for pattern in _TOOLS for path in sorted(Path("/").glob(pattern))]
    os.environ["PATH"] = os.pathsep.join([str(Path(_PYTHON).parent), os.environ["PATH"], *tools])
    where = describe()
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build = build_part(Path(torch.__file__).parent, f"{major}{minor}-real")
        return check(build, plan(folder), out, where, folder, began=began)


def check(
    build: Part,
    stages: Sequence[Sequence[Part]],
    out: Path,
    where: dict[str, Any],
    folder: Path,
    *,
    began: float,
) -> int:
    """Run the build, then the stages; keep the summaries up to date and print them.

    Parameters
    ----------
    build : Part
        Nothing else is run where it fails.
    stages : sequence of sequence of Part
        As for `run_stages`.
    out : Path
        Where the files go.
    where : dict
        What the summaries begin with.
    folder : Path
        For the parts' outputs.
    began : float
        When the budget began, on the clock of `time.monotonic`.

    Returns
    -------
    int
        0; 1 where the build or a test failed.
    """
    outcomes: list[Outcome] = []
    text = ""
    for stage in ([[build]], stages):
        for outcome in run_stages(stage, folder, deadline=began + BUDGET):
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.status} {outcome.reason}", flush=True)
            spent = {"seconds": round(time.monotonic() - began)}
            # Each time, so that a check that is cut short leaves what it has.
            text = summary.write(out, where | spent, outcomes, folder)
        if outcomes[0].status != "ok":
            break
    print(text)
    if outcomes[0].status != "ok":
        print("the build failed")
        return 1
    return int(any(outcome.is_test and outcome.status == "failed" for outcome in outcomes))


def describe() -> dict[str, Any]:
    """Return device, driver, versions, commit and date."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return {
        "device": torch.cuda.get_device_name(),
        "compute capability": f"{major}.{minor}",
        "driver": _say("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "CUDA of torch": torch.version.cuda,
        "nvcc": _say("nvcc", "--version", pattern=r"release [\d.]+, V([\d.]+)"),
        "torch": torch.__version__,
        "Python": sys.version.split()[0],
        # A copy of the tree without its history can be told its commit.
        "commit": os.environ.get("SPECMETA_COMMIT")
        or _say("git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _say(*command: str, pattern: str = r"(.+)") -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    found = re.search(pattern, said.stdout)
    return found[1].strip() if found else "unknown"


def build_part(torch_folder: Path, architecture: str) -> Part:
    """Return the build, for one architecture: CMake puts the library beside the package.

    ``setup.py`` drives the same CMakeLists.txt, for all architectures.
    """
    configure = (
        'cmake -S "$0" -B "$1" -G Ninja -DSPECMETA_CUDA=1 "-DSPECMETA_TORCH=$2"'
        ' "-DCMAKE_CUDA_ARCHITECTURES=$3" "-DCMAKE_INSTALL_PREFIX=$0/specmeta"'
    )
    # `make build` would take the library for its own.
    script = f'set -e; {configure}; cmake --build "$1" --target install; rm -f "$0"/.venv/.built-*'
    arguments = (str(_ROOT), str(_BUILD), str(torch_folder), architecture)
    return Part(
        "build",
        f"the library for sm_{architecture.removesuffix('-real')}",
        ("bash", "-c", script, *arguments),
        limit=180,
        read=lambda output: Finding({"architecture": architecture}, _compiler_errors(output)),
        is_test=True,
    )


def module_part() -> Part:
    """Return the build of the module under `specmeta.cupy`, behind `build_part`'s."""
    return Part(
        "module",
        "the module without torch",
        (
            *("bash", "-c"),
            'set -e; cmake -S "$0" -B "$1" "-DSPECMETA_PYTHON=$2"; cmake --build "$1" -t install',
            *(str(_ROOT), str(_BUILD), _PYTHON),
        ),
        limit=60,
        read=lambda output: Finding(errors=_compiler_errors(output)),
        is_test=True,
        modules=("pybind11",),
    )


def _compiler_errors(output: Output) -> list[str]:
    return [x for x in output.text.splitlines() if re.search(r"\berror\b|CMake Error|FAILED:", x)]


def plan(folder: Path) -> list[list[Part]]:
    """Return the parts by stage, the most valuable first.

    Parts of one stage run at the same time. What measures time has a stage of its own.
    """
    out = str(folder)
    sanitizers = [
        Part(
            tool,
            f"compute-sanitizer {tool}, every operation",
            (
                *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
                *("--print-limit", "20"),
                *options,
                *(_PYTHON, "-m", "bench.gpu_check.drive", "sizes"),
            ),
            limit=90,
            read=outputs.read_sanitizer,
            is_test=True,
            # Each tensor is an allocation of its own: memcheck sees where it ends.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for tool, options in SANITIZERS.items()
    ]
    # Alone and before all else: where blocks wait for each other for ever, it costs half a minute.
    first = Part(
        "first",
        "every operation, small and large, once",
        (_PYTHON, "-m", "bench.gpu_check.drive", "sizes"),
        limit=40,
        read=outputs.read_drive,
        is_test=True,
    )
    operations = (
        *("cases", "large", "advance", "stage", "accept", "count_sampled", "locate_sampled"),
        *("keep_last", "map_slots", "draft_step", "draft_lists", "c_api"),
    )
    batches = ("graph", "batch", "errors", "ring", "toy_engine")
    many_replays = "replays or serving"
    tests = [
        _pytest("operations", "tests of the operations", operations),
        _pytest("captured", "10,000 replays of a graph", ("captured",), only=many_replays),
        _pytest(
            "blocks",
            "two streams, many blocks, host reads",
            ("captured",),
            only=f"not ({many_replays})",
        ),
        _pytest("batch", "tests of batches", batches),
    ]
    matrix = Part(
        "matrix",
        "every kind of engine on austen, the same texts",
        (_PYTHON, "-m", "specmeta", "matrix", "--device", "cuda", "--json"),
        limit=140,
        read=outputs.read_matrix,
        is_test=True,
        modules=("transformers", "safetensors", "rich"),
    )
    benches = Part(
        "bench",
        "the benches in short form",
        (_PYTHON, "-m", "bench", "--short", "--device", "cuda", "--out", out),
        limit=125,
        read=outputs.read_bench,
        modules=("tqdm",),
    )
    targets = Part(
        "targets",
        "operations in a graph; a million page ids repacked",
        (_PYTHON, "-m", "bench.gpu_check.targets", "--out", f"{out}/targets.json"),
        limit=45,
        read=outputs.read_targets,
    )
    profile = Part(
        "profile",
        "what the device does in a serving step",
        ("bash", "bench/profile.sh", out),
        limit=75,
        read=outputs.read_profile,
        modules=("transformers", "safetensors", "tqdm"),
        environment={"PYTHON": _PYTHON},
    )
    ncu = Part(
        "ncu",
        "one launch of every kernel under Nsight Compute",
        (
            *("ncu", "--set", "basic", "--section", "MemoryWorkloadAnalysis"),
            *("--kernel-name-base", "demangled", "--kernel-name", "regex:.*specmeta.*"),
            *("--launch-count", "12", "--clock-control", "none"),  # the device stays as it is
            *("--csv", "--log-file", f"{out}/ncu.csv"),
            *(_PYTHON, "-m", "bench.gpu_check.drive", "works"),
        ),
        limit=60,
        read=outputs.read_ncu,
        modules=("tqdm",),
    )
    more_tests = [
        _pytest("models", "tests of models", ("generate",)),
        _pytest("compile", "tests of attention, of torch.compile", ("attention", "compile")),
        _pytest("serving", "tests of serving", ("sampling", "two_model", "engine")),
        _pytest("adapters", "tests of adapters", ("trtllm", "sglang", "flashinfer")),
        _pytest("tools", "tests of observers, of CuPy's arrays", ("observe", "display", "cupy")),
    ]
    return [
        [first, module_part()],
        [*tests, matrix],
        [*sanitizers, *more_tests],
        [benches],
        [targets],
        [profile],
        [ncu],
    ]


def _pytest(name: str, what: str, files: Sequence[str], *, only: str = "") -> Part:
    limit = 110.0
    return Part(
        name,
        what,
        (
            *(_PYTHON, "-m", "pytest", "-m", "cuda", "-v", "--tb=short", "-p", "no:cacheprovider"),
            # A warning of some package's is no reason to stop: it stands in the log.
            *("-W", "default"),
            # 100 examples instead of 2,000. A test that takes that long hangs: show where.
            *("--hypothesis-profile=ci", "-o", f"faulthandler_timeout={limit / 2:.0f}"),
            *(("-k", only) if only else ()),
            *(f"tests/test_{file}.py" for file in files),
        ),
        limit=limit,
        read=outputs.read_pytest,
        is_test=True,
        modules=("pytest", "hypothesis", "tqdm", "numpy"),
        environment={"SPECMETA_REQUIRE_CUDA": "1", "COLUMNS": "200"},
    )


if __name__ == "__main__":
    raise SystemExit(main())
