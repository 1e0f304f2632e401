"""What the outputs of the parts say."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from bench.gpu_check.run import Finding, Output

LIMIT_US = 3.0  # an operation in a graph, at 256 rows
LEAST_SHARE = 0.7  # of the copy bandwidth, when a million page ids are repacked

_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|warnings?)")
_SANITIZER_REFUSES = re.compile(
    r"Device not supported|Internal Sanitizer Error|before first instrumented API call"
    r"|Failed to initialize|[Uu]nrecogni[sz]ed option"
)
_NCU_REFUSES = re.compile(
    r"==ERROR==|ERR_NVGPUCTRPERM|Failed to initialize|LibraryNotLoaded|[Uu]nrecogni[sz]ed option"
)
_SANITIZER_SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_NCU_METRICS = (
    "Duration",
    "Registers Per Thread",
    "Achieved Occupancy",
    "Memory Throughput",
    "DRAM Throughput",
    "L2 Cache Throughput",
)


def read_pytest(output: Output) -> Finding:
    """Read what ``pytest -v -ra`` printed: counts, and the lines of what failed."""
    lines = output.stdout.splitlines()
    errors = [x for x in output.text.splitlines() if re.match(r"(FAILED|ERROR):? ", x)]
    figures: dict[str, Any] = {}
    ends = [line for line in lines if re.match(r"=+ .* in [\d.]+s", line)]
    if ends:
        figures = {name: int(count) for count, name in _COUNT.findall(ends[-1])}
    else:  # it was ended
        done = [line for line in lines if re.search(r" (PASSED|FAILED|SKIPPED|ERROR)\b", line)]
        if done:
            figures = {"passed": sum(" PASSED" in line for line in done), "ended": "early"}
        errors += [f"the last line: {line}" for line in lines[-1:]]
    if "passed" not in figures and "failed" not in figures:
        return Finding(errors=errors or ["no test ran"])
    return Finding(figures, errors)


def read_drive(output: Output) -> Finding:
    """Read what the driver printed: how many calls were right, or the one that was the last."""
    calls = re.search(r"^(\d+) calls$", output.stdout, re.MULTILINE)
    if calls:
        return Finding({"calls": int(calls[1])})
    last = (output.stderr.strip() or output.stdout.strip() or "nothing").splitlines()[-1]
    return Finding(errors=[f"it ended with: {last}"])


def read_sanitizer(output: Output) -> Finding:
    """Read what compute-sanitizer and the program under it printed."""
    said = [line for line in output.text.splitlines() if line.startswith("=========")]
    found = _SANITIZER_SUMMARY.search(output.text)
    notes = [line.lstrip("= ") for line in said if line.strip("= ")]
    notes = [n for n in notes if not n.startswith(("COMPUTE-SANITIZER", "ERROR SUM", "RACECHECK"))]
    refusals = [note for note in notes if _SANITIZER_REFUSES.search(note)]
    if refusals:
        return Finding(refused=refusals[0])
    if found is None:
        last = [*notes, *output.stderr.split("\n"), "no summary"]
        return Finding(errors=[next(line for line in last if line.strip())])
    figures: dict[str, Any] = {"errors": int(found[1])}
    calls = re.search(r"(\d+) calls", output.stdout)
    if calls:
        figures["calls"] = int(calls[1])
    return Finding(figures, notes if figures["errors"] else [])


def read_ncu(output: Output) -> Finding:
    """Read ``ncu.csv``, what ``ncu --csv --log-file`` wrote, one line a launch and metric."""
    path = output.folder / "ncu.csv"
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        said = [line for line in (text + output.text).splitlines() if _NCU_REFUSES.search(line)]
        if said:
            return Finding(refused=said[0].lstrip("= "))
        return Finding(errors=["no launch was profiled"])
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines[starts[0] :]):
        kernel = re.search(r"(\w+)_kernel", row.get("Kernel Name") or "")
        launch = f"{row['ID']} {kernel[1] if kernel else row.get('Kernel Name')}"
        values = launches.setdefault(launch, {"Grid Size": row.get("Grid Size") or ""})
        name = row.get("Metric Name") or ""
        if name in _NCU_METRICS:
            # Two sections have a "Memory Throughput": in % and in bytes a second.
            unit = row.get("Metric Unit") or ""
            values.setdefault(f"{name}, {unit}", row.get("Metric Value") or "")
    return Finding(dict(launches))


def read_matrix(output: Output) -> Finding:
    """Read the JSON object of ``specmeta matrix``, and keep it."""
    content = json.loads(output.stdout)
    (output.folder / "matrix.json").write_text(output.stdout)
    combinations = content["combinations"]
    figures = {
        "combinations": len(combinations),
        "texts": sum(result["num_texts"] for result in combinations),
        "texts that differ": sum(len(result["differences"]) for result in combinations),
    }
    return Finding(figures, list(content["faults"]))


def read_profile(output: Output) -> Finding:
    """Read ``profile-cuda.json``: the line of the serving step."""
    content = read_json(output.folder / "profile-cuda.json")
    steps = [line for line in content["lines"] if line["range"] == "serving step"]
    figures = {"counted by": content["tool"]}
    for line in steps:
        names = ("count", "kernels", "specmeta_kernels", "launches", "syncs", "copies_to_host")
        figures |= {name: line[name] for name in (*names, "idle_us")}
    return Finding(figures)


def read_bench(output: Output) -> Finding:
    """Read ``results-cuda.json``: how much was measured, and the headline."""
    content = read_json(output.folder / "results-cuda.json")
    figures: dict[str, Any] = {
        "measured": len(content["results"]),
        "skipped": len(content["skipped"]),
        "floor_us": content["floor"]["median_us"],
    }
    figures |= content["headline"]
    figures |= {"operations in a graph": operations_in_a_graph(content)}
    return Finding(figures)


def operations_in_a_graph(bench: dict[str, Any]) -> dict[str, Any]:
    """Return, by operation and size, ``warm_us`` and ``cold_us`` in a graph at 256 rows."""
    found: dict[str, Any] = {}
    for line in bench["results"]:
        is_ours = (line["implementation"], line["mode"]) == ("ours", "graph")
        if is_ours and line["operation"] != "repack" and line["work"]["rows"] == 256:
            found.setdefault(line["operation"], {})[line["work"]["name"]] = {
                f"{kind}_us": None if line[kind] is None else line[kind]["median_us"]
                for kind in ("warm", "cold")
            }
    return found


def read_targets(output: Output) -> Finding:
    """Hold what was measured against the targets. A target that isn't met is no failure."""
    figures: dict[str, Any] = {}
    bench = output.folder / "results-cuda.json"
    if bench.exists():
        for operation, sizes in operations_in_a_graph(read_json(bench)).items():
            if "256 rows" in sizes:
                warm = sizes["256 rows"]["warm_us"]
                figures[operation] = {"us": warm, "at most": LIMIT_US, "met": warm <= LIMIT_US}
    repack = read_json(output.folder / "targets.json")
    for kind in ("warm", "cold"):
        share = repack[kind]["share_of_large_copy"]
        figures[f"repack, {kind}"] = {
            **repack[kind],
            "at least": LEAST_SHARE,
            "met": share >= LEAST_SHARE,
        }
    figures["large copy, GB/s"] = repack["large_copy_gb_s"]
    return Finding(figures)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text())
