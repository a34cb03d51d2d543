"""Decode speed by the engine's own parts, beside mlx-lm's `BatchGenerator` in the same process.

    python -m benchmarks.gpu                                   # every shape; needs a GPU
    python -m benchmarks.gpu --shape tiny --context 64 --steps 8   # a minute on any machine
    python -m benchmarks.gpu --shape 8b --join --join-context 4096

Random weights, random prompts. Runs of the two alternate; a cell is the median of its
runs. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import mlx.core as mx
import numpy as np

from benchmarks import joining
from benchmarks.contenders import Contender, Mlxd, MlxLm, Pass
from benchmarks.shapes import SHAPES, Built, build
from mlxd.engine import attention, warmup
from mlxd.wire import Sampling

#: Arrays of this size are copied to find out the bandwidth; several times any cache.
COPY_BYTES = {"cpu": 1 << 28, "gpu": 1 << 32}
SAMPLINGS = ("greedy", "mixed", "mixed-open")


@dataclass(frozen=True, slots=True)
class Cell:
    """One contender at one width, over all its runs."""

    contender: str
    sampling: str
    rows: int
    context: int
    passes: list[Pass]

    @property
    def rate(self) -> float:
        """Tokens per second of all rows together, the median of the runs."""
        return statistics.median(self.rows * len(p.steps) / sum(p.steps) for p in self.passes)

    def line(self, floor: float, base: float | None) -> str:
        """The table's line.

        Args:
            floor: seconds that reading what a step needs takes.
            base: tokens per second of the contender to compare with.
        """
        steps = [seconds for p in self.passes for seconds in p.steps]
        p50, p99 = np.percentile(steps, [50, 99])
        rates = [self.rows * len(p.steps) / sum(p.steps) for p in self.passes]
        cells = [
            self.sampling,
            str(self.rows),
            str(self.context),
            self.contender,
            f"{p50 * 1e3:.2f}",
            f"{p99 * 1e3:.2f}",
            f"{self.rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
            "" if base is None else f"{self.rate / base:.2f}",
            f"{floor / p50:.2f}",
            f"{max(p.first for p in self.passes) * 1e3:,.0f}",
        ]
        return "| " + " | ".join(cells) + " |"


HEAD = (
    "| sampling | rows | context | | step p50 ms | p99 ms | tokens/s | of mlx-lm's | of the floor"
    " | slowest first step ms |\n|---|---|---|---|---|---|---|---|---|---|"
)


def sampling(kind: str, row: int) -> Sampling:
    """A row's settings: different in every row, as different clients send them."""
    if kind == "greedy":
        return Sampling(seed=row, temperature=0.0)
    random = np.random.default_rng(row)
    return Sampling(
        seed=row,
        temperature=round(float(random.uniform(0.5, 1.2)), 3),
        top_p=round(float(random.uniform(0.8, 0.99)), 3),
        top_k=int(random.integers(20, 61)) if kind == "mixed" else 0,
    )


def prompts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random token ids."""
    random = np.random.default_rng(rows * length)
    tokens: list[list[int]] = random.integers(0, vocab_size, (rows, length)).tolist()
    return tokens


def bandwidth() -> float:
    """Bytes per second that a copy of a large array reads and writes."""
    size = COPY_BYTES["cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"]
    source = mx.random.normal((size // 4,))
    mx.eval(source, source + 1)
    began = time.perf_counter()
    for _ in range(5):
        mx.eval(source + 1)
    return 5 * 2 * size / (time.perf_counter() - began)


def compare(
    built: Built, contenders: Sequence[Contender], kind: str, rows: int, options: argparse.Namespace
) -> list[Cell]:
    """Run all contenders in turn, several times."""
    asked = prompts(rows, options.context, built.loaded.vocab_size)
    samplings = [sampling(kind, row) for row in range(rows)]
    passes: dict[str, list[Pass]] = {contender.name: [] for contender in contenders}
    for _ in range(options.runs):
        for contender in contenders:
            passes[contender.name].append(contender.run(asked, samplings, options.steps))
    return [Cell(name, kind, rows, options.context, done) for name, done in passes.items()]


def run(name: str, options: argparse.Namespace, speed: float) -> None:
    """Everything about one shape."""
    began = time.perf_counter()
    built = build(SHAPES[name])
    tell(
        f"\n## {name}: {built.loaded.weight_bytes / 1e9:.2f} GB of weights, of which a step reads "
        f"{built.weight_bytes / 1e9:.2f}; built in {time.perf_counter() - began:.1f} s\n"
    )
    ours = Mlxd(built.loaded, max(options.rows))
    contenders: list[Contender] = [ours]
    if "mlx-lm" in options.contender:
        contenders.append(MlxLm(built.loaded))
    if options.warm:
        with attention.seam(built.loaded.model, "auto"):
            seconds = warmup.run(ours.runner, built.loaded, ours.tuning).seconds
        tell(f"warm-up at width {max(options.rows)}: {seconds:.1f} s\n")
    tell(HEAD)
    for kind in options.sampling:
        for rows in options.rows:
            cells = compare(built, contenders, kind, rows, options)
            base = next((cell.rate for cell in cells if cell.contender == "mlx-lm"), None)
            floor = built.step_bytes(rows, options.context + options.steps // 2) / speed
            for cell in cells:
                tell(cell.line(floor, base))
    if options.join:
        join(built, max(options.rows), options.join_context)


def join(built: Built, rows: int, context: int) -> None:
    """The table of events."""
    tell(f"\n| {rows} rows of {context} tokens | | ms | more memory at its peak, MB |")
    tell("|---|---|---|---|")
    for event in joining.measure(built, rows, context):
        tell(
            f"| {event.name} | {event.who} | {event.seconds * 1e3:.2f} "
            f"| {event.peak_growth / 1e6:,.0f} |"
        )


def tell(text: str) -> None:
    """Print at once: a run may be stopped at any time."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape", action="append", choices=list(SHAPES), help="default: 0.6b, 8b, 8b-4bit"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=64, help="steps of a run that count")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument(
        "--contender", nargs="+", choices=["mlxd", "mlx-lm"], default=["mlxd", "mlx-lm"]
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="run mlxd's own warm-up first, and say how long it takes",
    )
    parser.add_argument(
        "--join", action="store_true", help="also measure rows that join, leave and grow"
    )
    parser.add_argument("--join-context", type=int, default=4096)
    options = parser.parse_args(arguments)
    speed = bandwidth()
    tell(
        f"{mx.device_info().get('device_name', 'unknown')}, MLX {version('mlx')}, "
        f"{mx.default_device()}; copies at {speed / 1e9:,.0f} GB/s"
    )
    for name in options.shape or ["0.6b", "8b", "8b-4bit"]:
        run(name, options, speed)
        mx.clear_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
