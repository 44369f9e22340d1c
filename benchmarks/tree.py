"""The tree watch: a walk against find(1), a sync with and without a change. Prints one line a measurement.

    python benchmarks/tree.py [directories] [files in each]

Wall time; the walk is interleaved with `find` in one run and the medians are compared. No jail is needed: the
mounts themselves are measured with the start of a jail.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vectora_jail._tree import Tree
from vectora_jail.masks import split_patterns

ROUNDS = 9
MASKS = (
    ".env",
    "**/*.pem",
    "**/.ssh/**",
    "**/.aws/**",
    "*.key",
    ".env.*",
    "!.env.example",
    "secrets/",
    "id_rsa*",
)


def make(root: Path, directories: int, files: int) -> None:
    """A tree three levels deep, with a secret in every hundredth directory."""
    for number in range(directories):
        place = root / f"part{number // 1000}" / f"group{number // 50 % 20}" / f"package_{number % 50}"
        place.mkdir(parents=True)
        for name in range(files):
            (place / f"module_{name}.py").touch()
        if number % 100 == 0:
            (place / "key.pem").touch()


def spec(root: Path, **more: object) -> dict[str, object]:
    """A tree with one writable grant and the usual masks."""
    workspace = os.fsencode(root)
    rules = split_patterns((), MASKS, workspace=workspace)
    masks = [[rule.pattern, rule.negate, rule.floor] for rule in rules]
    return {"roots": [[workspace, True]], "workspace": workspace, "masks": masks, "git": 2, **more}


def timed(action: object) -> float:
    """Milliseconds of one call."""
    begin = time.perf_counter()
    action()  # type: ignore[operator]
    return (time.perf_counter() - begin) * 1000


def walk(root: Path, **more: object) -> tuple[float, dict[str, object]]:
    """One walk of a new tree: milliseconds and the report."""
    tree = Tree(spec(root, **more))
    try:
        return timed(tree.scan), tree.report()
    finally:
        tree.close()


def main() -> None:
    """Make the tree, measure, print."""
    directories = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    files = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    with tempfile.TemporaryDirectory() as where:
        root = Path(where) / "tree"
        make(root, directories, files)
        finds, walks, watched = [], [], []
        report: dict[str, object] = {}
        for _ in range(ROUNDS):
            finds.append(timed(lambda: subprocess.run(["find", root], stdout=subprocess.DEVNULL, check=True)))
            walks.append(walk(root, max_watches=1)[0])
            milliseconds, report = walk(root)
            watched.append(milliseconds)
        find, plain, full = (statistics.median(v) for v in (finds, walks, watched))
        print(
            f"tree: {report['entries']} entries, {report['dirs']} directories, {len(report['masks'])} masks"
        )  # type: ignore[arg-type]
        print(f"find                  {find:8.1f} ms")
        print(f"walk                  {plain:8.1f} ms  {plain / find:.2f} x find")
        print(f"walk and watch        {full:8.1f} ms  {full / find:.2f} x find")
        tree = Tree(spec(root))
        tree.scan()
        tree.sync()
        idle = sorted(timed(tree.sync) for _ in range(5000))
        print(
            f"sync, no change       {idle[2500] * 1000:8.2f} us p50, {idle[4950] * 1000:.2f} us p99 (Python included)"
        )
        changed = []
        for number in range(200):
            (root / "part0/group0/package_0" / f"new{number}").touch()
            changed.append(timed(tree.sync))
        print(f"sync, one new file    {statistics.median(changed) * 1000:8.1f} us p50")
        tree.close()


if __name__ == "__main__":
    main()
