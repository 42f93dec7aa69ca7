"""The result of the demo: a table with bars for the terminal, row by row, and JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...timeline.format import count
from ...timeline.picture import Bar
from .experiments import COMPUTING_TURNS, MAX_COMPUTED, Experiment, ExperimentOutcome

WIDTH = 80  # of the terminal
BAR_WIDTH = 30

TALK_FIGURES = (
    "The talk of 2009: 114 s sequential, II best with 8 drones, III best with\n"
    "13 threads: 15 s, 35 s combined."
)

LEGEND = """\
Loading, which waits for pages:
  sequential  this process loads one list after another
  I           5 drones, one list each
  II          a pool of drones: each page of funds is a task, each other list too
  III         green threads of this process: the same tasks
  combined    5 drones, one list each; 13 green threads in the drone of funds"""

HEADER = f"{'experiment':<12}{'drones':>7}{'threads':>9}{'seconds':>9}{'speed-up':>10}"

COMPUTING_LEGEND = """
Computing, which waits for nothing: parsing the same pages, which are in memory
now, and three indicators of each of {count:,} of their securities, of a year of
simulated prices, in this process, by green threads, and by a pool of drones.
The three take turns; the best of {turns} counts."""

BUSY = 1.3
"""The speed-up of computing threads, which have one interpreter lock, from which something else
must have used the processors while this process computed alone.
"""
MIN_SPEED_UP = 1.2
"""The speed-up from which a way is said to have won. Less may be chance."""


def row(outcome: ExperimentOutcome, baseline: ExperimentOutcome) -> str:
    """Return the line of an experiment below `HEADER`, with its speed-up against the baseline.

    The bar is relative to the baseline, too.
    """
    run, share = outcome.experiment, outcome.seconds / baseline.seconds
    bar = "#" * max(1, min(BAR_WIDTH, round(BAR_WIDTH * share)))
    numbers = f"{run.drones:>7}{run.threads:>9}{outcome.seconds:>9.3f}{1 / share:>9.1f}x"
    return f"{run.name:<12}{numbers}  {bar}"


def computing_legend(outcome: ExperimentOutcome) -> str:
    return COMPUTING_LEGEND.format(
        count=min(MAX_COMPUTED, sum(outcome.rows.values())), turns=COMPUTING_TURNS
    )


def conclusion(
    outcomes: Iterable[ExperimentOutcome], computations: Sequence[ExperimentOutcome]
) -> str:
    """Return the closing line: the talk's conclusion, or what this run did not show of it."""
    baseline, *others = outcomes
    waiting = max(
        baseline.seconds / each.seconds for each in others if each.experiment.name == "III"
    )
    alone = computations[0].seconds
    computing = {each.experiment.name: alone / each.seconds for each in computations}
    threads, drones = computing["threads"], computing["drones"]
    if threads > BUSY:
        return (
            f"Threads cannot compute {threads:.1f} times as fast as one: other programs have used "
            "the processors meanwhile. The figures mean nothing; run this again when they are free."
        )
    threads_won, drones_won = waiting >= MIN_SPEED_UP, drones >= MIN_SPEED_UP * max(1, threads)
    if threads_won and drones_won:
        return (
            f"Threads for waiting ({waiting:.1f} times as fast), drones for computing "
            f"({drones:.1f} times; threads: {threads:.1f}), both for both."
        )
    missed = []
    if not threads_won:
        missed.append(
            f"threads did not win at waiting ({waiting:.1f} times as fast): they win if there are "
            "several, and answers take time"
        )
    if not drones_won:
        missed.append(
            f"drones did not win at computing ({drones:.1f} times as fast; threads: "
            f"{threads:.1f}): each needs a processor that is free"
        )
    return f"This run does not show the talk's conclusion: {'; '.join(missed)}."


def summary(outcomes: Sequence[ExperimentOutcome]) -> str:
    """Return the text after the last row.

    The text has the sizes of the lists, whether they are equal, and the figures of the talk.
    """
    sizes = ", ".join(f"{number:,} {_title(name)}" for name, number in outcomes[0].rows.items())
    return "\n".join(["", sizes, _comparison(outcomes), *_best_runs(outcomes), TALK_FIGURES])


def bars(
    outcomes: Sequence[ExperimentOutcome], computations: Sequence[ExperimentOutcome] = ()
) -> list[Bar]:
    """Return the bar chart of the talk, and of the second part: the seconds of each experiment, and
    its speed-up.
    """
    return [
        Bar(
            f"{part}{_label(each.experiment)}",
            each.seconds,
            f"{part_outcomes[0].seconds / each.seconds:.1f}x",
        )
        for part, part_outcomes in (("", outcomes), ("computing, ", computations))
        for each in part_outcomes
    ]


def equal(outcomes: Iterable[ExperimentOutcome]) -> bool:
    """Return True if all experiments loaded the same lists."""
    return not any(outcome.differing for outcome in outcomes)


def as_json(
    outcomes: Sequence[ExperimentOutcome], computations: Sequence[ExperimentOutcome] = ()
) -> dict[str, Any]:
    """Return the sizes of the lists, whether they are equal, and the time of each experiment."""
    return {
        "lists": outcomes[0].rows,
        "equal": equal(outcomes),
        "experiments": [*map(_timed, outcomes)],
        "computing": [*map(_timed, computations)],
    }


def _timed(outcome: ExperimentOutcome) -> dict[str, Any]:
    run, seconds = outcome.experiment, round(outcome.seconds, 6)
    return {"name": run.name, "seconds": seconds, "drones": run.drones, "threads": run.threads}


def _comparison(outcomes: Sequence[ExperimentOutcome]) -> str:
    if equal(outcomes):
        return f"The five lists are the same in all {len(outcomes)} runs, row for row."
    differing = (
        f"{o.experiment.name} with {_counts(o.experiment)} ({', '.join(map(_title, o.differing))})"
        for o in outcomes
        if o.differing
    )
    return f"THE LISTS DIFFER from those of the first run in: {'; '.join(differing)}"


def _best_runs(outcomes: Iterable[ExperimentOutcome]) -> Iterator[str]:
    """Yield the best run of each experiment that runs with several numbers."""
    runs: dict[str, list[ExperimentOutcome]] = {"II": [], "III": []}
    for outcome in outcomes:
        runs.get(outcome.experiment.name, []).append(outcome)
    for name, candidates in runs.items():
        if candidates:
            best = min(candidates, key=lambda outcome: outcome.seconds)
            yield f"{name} was best with {_counts(best.experiment)}: {best.seconds:.2f} s."


def _counts(experiment: Experiment) -> str:
    counts = [count(experiment.drones, "drone")] if experiment.drones else []
    if experiment.threads > 1 or not experiment.drones:
        counts.append(count(experiment.threads, "thread"))
    return " and ".join(counts)


def _label(experiment: Experiment) -> str:
    name = experiment.name
    return name if name == "sequential" else f"{name}, {_counts(experiment)}"


def _title(name: str) -> str:
    return {"etfs": "ETFs", "funds": "funds"}.get(name, name.upper())
