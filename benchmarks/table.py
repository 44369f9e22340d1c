"""Print the table of what a jailed call costs beside the alternatives, as markdown.

    python benchmarks/table.py [--quick] [--rounds N] [--only GROUP …]

Every figure is a ratio of two medians from the same run, in which the two took turns in shuffled order; p50, p99 and
CPU time stand beside it. The whole is done twice: with all processors, and with everything on one. Raw samples go
to benchmarks/raw/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GROUPS = ("commands", "asyncio_commands", "shell", "ping", "files", "starts", "rates", "work")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure in this process, in the affinity it has."""
    import cases

    pinned = len(os.sched_getaffinity(0)) == 1
    out: dict[str, Any] = {"rows": [], "notes": []}
    with tempfile.TemporaryDirectory(prefix="vj-bench-", dir=args.directory) as place:
        tools, workspace = Path(place, "tools"), Path(place, "workspace")
        tools.mkdir()
        workspace.mkdir()
        cases.build(tools)
        bench = cases.Bench(workspace, tools, args.rounds)
        with bench.open() as jail:
            report = jail.report
            out["layers"] = [f"{layer.name}: {layer.state}" for layer in report.layers]
            out["degraded"] = [f"{layer.name} ({layer.detail})" for layer in report.degraded]
        for group in args.only or GROUPS:
            if group == "rates" and pinned:
                continue
            print(f"… {group}", file=sys.stderr, flush=True)
            rows = cases.files(bench, pinned=pinned) if group == "files" else getattr(cases, group)(bench)
            out["rows"] += [as_json(row) for row in rows]
        if not pinned:
            out["pss"] = cases.memory(bench)
    return out


def as_json(row: Any) -> dict[str, Any]:
    """Return a row with its samples."""
    sides = {
        side: {
            "name": way.name,
            "cpu": way.cpu,
            "samples": way.samples,
            "p50": way.p(0.5),
            "p99": way.p(0.99),
        }
        for side, way in (("ours", row.ours), ("theirs", row.theirs))
    }
    return {
        "what": row.what,
        "against": row.against,
        "goal": row.goal,
        "more": row.more_is_better,
        "ratio": row.ratio,
        **sides,
    }


def machine() -> str:
    """Describe the machine in one line."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    virtual = " (virtual)" if "hypervisor" in Path("/proc/cpuinfo").read_text(encoding="utf-8") else ""
    bwrap = subprocess.run(["bwrap", "--version"], check=False, capture_output=True, text=True).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model}{virtual}, {os.cpu_count()} CPUs, {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {bwrap}, load average before {os.getloadavg()[0]:.1f}"
    )


def time_text(microseconds: float) -> str:
    """Return a duration with a fitting unit."""
    if microseconds != microseconds:  # noqa: PLR0124 — not a number
        return "–"
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.2f} ms" if microseconds < 1e5 else f"{microseconds / 1000:.0f} ms"


def cell(row: dict[str, Any] | None) -> list[str]:
    """Return ratio, p50 and p99, and CPU of one row."""
    if row is None:
        return ["–", "–", "–"]
    ours, theirs = row["ours"], row["theirs"]
    ratio = row["ratio"]
    text = f"{ratio:.3f}" if ratio < 0.2 else f"{ratio:.2f}"
    if row["goal"] is not None:
        met = ratio >= row["goal"] if row["more"] else ratio <= row["goal"]
        text = f"**{text}**" if met else text
    if row["more"]:
        return [text, f"{ours['p50']:.0f}/s : {theirs['p50']:.0f}/s", "–"]
    times = " : ".join(f"{time_text(side['p50'])}, {time_text(side['p99'])}" for side in (ours, theirs))
    return [text, times, f"{time_text(ours['cpu'])} : {time_text(theirs['cpu'])}"]


def table(free: dict[str, Any], pinned: dict[str, Any] | None) -> str:
    """Return the markdown."""
    head = ["what", "against", "goal", "ratio", "p50, p99", "CPU", "pinned: ratio", "p50, p99", "CPU"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    other = {(row["what"], row["against"]): row for row in (pinned or {"rows": []})["rows"]}
    for row in free["rows"]:
        twin = other.get((row["what"], row["against"]))
        goal = "–" if row["goal"] is None else f"{'≥' if row['more'] else '≤'} {row['goal']:.3g}"
        if twin is not None and twin["goal"] != row["goal"]:
            goal += f" (pinned {twin['goal']:.3g})"
        lines.append("| " + " | ".join([row["what"], row["against"], goal, *cell(row), *cell(twin)]) + " |")
    return "\n".join(lines)


def in_child(args: argparse.Namespace, cpu: int | None) -> dict[str, Any]:
    """Measure in a fresh interpreter, so that every thread and process has the same affinity."""
    argv = [
        sys.executable,
        __file__,
        "--measure",
        "--rounds",
        str(args.rounds),
        "--directory",
        args.directory,
    ]
    argv += [part for group in args.only or () for part in ("--only", group)]
    before = os.sched_getaffinity(0)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
    finally:
        os.sched_setaffinity(0, before)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    parser.add_argument("--rounds", type=int, default=2000, help="turns of the short rows (default 2000)")
    parser.add_argument("--only", action="append", choices=GROUPS, help="one group; may be repeated")
    parser.add_argument("--directory", default="/var/tmp", help="where the workspaces are made")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds = 200
    if args.measure:
        json.dump(measure(args), sys.stdout)
        return
    about = machine()
    free = in_child(args, None)
    pinned = in_child(args, min(os.sched_getaffinity(0)))
    raw = HERE / "raw"
    raw.mkdir(exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S.json")
    (raw / name).write_text(json.dumps({"machine": about, "free": free, "pinned": pinned}), encoding="utf-8")
    print(f"{about}. {args.rounds} turns. Degraded layers: {', '.join(free['degraded']) or 'none'}.\n")
    print(table(free, pinned))
    if "pss" in free:
        many, alone = free["pss"]
        print(
            f"\nAn idle workspace, worker and monitor: {many // 1024} KiB PSS with 20 alive, {alone // 1024} alone."
        )
    print("\nRatio: our median by theirs; bold where it meets the goal. Times: ours : theirs.")


if __name__ == "__main__":
    main()
