"""What was asked for: the selected cells and seeds of a recipe, and the file that records them."""

import itertools
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from keel.experiments.recipe import Cell, Recipe, parse_recipe
from keel.experiments.results import runs_needed
from keel.experiments.runs import Options, code_folder, run_of
from protocol.files import digest, write_atomically
from protocol.options import did_you_mean

TUNED_SEEDS = 5  # that judge a tuned side, beside the one that tuned it
MAX_SLUG = 120  # characters: file systems allow 255, and a report's pictures have longer names


def first_seeds(recipe: Recipe, num_seeds: int) -> list[int]:
    """This many seeds: the recipe's in their order, then the lowest others."""
    more = (seed for seed in itertools.count() if seed not in recipe.seeds)
    return list(itertools.islice(itertools.chain(recipe.seeds, more), num_seeds))


def seeds_for(recipe: Recipe, cells: Collection[Cell]) -> Sequence[int]:
    """The recipe's seeds; where values are tried, five beside the one that chooses among them."""
    if all(len(cell.candidates) == 1 for cell in cells):
        return recipe.seeds
    return first_seeds(recipe, max(TUNED_SEEDS + 1, len(recipe.seeds)))


class Job(BaseModel):
    """What was asked for, for the report: `jobs/NAME.json`. text: the recipe's."""

    recipe: str
    text: str
    changes: dict[str, bool | int | float | str]
    seeds: list[int] = Field(min_length=1)
    cells: list[tuple[str, str]]

    def load(self) -> tuple[Recipe, Options]:
        """The recipe, with the selected cells alone, and the options. ValueError if it has none."""
        recipe = parse_recipe(self.text, Path(self.recipe)).narrowed(self.cells)
        if not recipe.cells:
            raise ValueError("none of its cells is in its recipe")
        return recipe, Options(self.changes, self.seeds)


def job_name(recipe: Recipe, options: Options) -> str:
    """The file name of a job, without suffix; ASCII alone, so that it has few bytes."""
    names = [recipe.name, *filter(None, [options.label])]
    slug = re.sub("[^A-Za-z0-9]", "-", "--".join(names))
    return f"{slug[:MAX_SLUG]}-{digest(json.dumps(names).encode())[:8]}"


def damaged(path: Path, error: ValueError) -> ValueError:
    """The refusal of a job file."""
    return ValueError(
        f"{path}: {' '.join(str(error).split())}; to leave its table out, move this file away "
        "(runs are kept)"
    )


def load_job(path: Path) -> tuple[Recipe, Options]:
    """`Job.load` of a file. ValueError if it is damaged, or names a key that no longer exists."""
    try:
        recipe, options = Job.model_validate_json(path.read_bytes()).load()
        for cell in recipe.cells:
            run_of(cell, cell.candidates[0], 0, options, path.parent)
    except ValueError as error:
        raise damaged(path, error) from error
    return recipe, options


def save_job(
    recipe: Recipe, options: Options, output: Path, cells: Sequence[Cell]
) -> tuple[Recipe, Options]:
    """Record what is run, for the report; returns all that was asked for in this job so far.

    A call with a recipe of this name and these options continues its job: its seeds come first, so
    that the one that tunes stays, and selected cells are added. ValueError if the job is damaged or
    is that of another recipe of this name.
    """
    path = output / "jobs" / f"{job_name(recipe, options)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = Job.model_validate_json(path.read_bytes()) if path.exists() else None
    except ValueError as error:
        raise damaged(path, error) from error
    place = str(recipe.path.absolute())
    if before and before.recipe != place and before.text != recipe.text:
        raise ValueError(
            f"recipe {place}: {output} has the table of another recipe of this name, "
            f"{before.recipe}: choose another --output, or rename one of the two files"
        )
    job = Job(
        recipe=place,
        text=recipe.text,
        changes=dict(options.changes),
        seeds=list(dict.fromkeys([*(before.seeds if before else []), *options.seeds])),
        cells=list(dict.fromkeys([*(before.cells if before else []), *(c.name for c in cells)])),
    )
    write_atomically(path, job.model_dump_json(indent=1).encode())
    return job.load()


def folder_of(recipe: Recipe, options: Options, output: Path) -> Path:
    """The folder of the code of which a report shows runs.

    Today's if it has a run of the recipe that has ended, else the one last changed that has.
    """
    today = output / "runs" / code_folder()
    others = sorted((output / "runs").glob("*/"), key=lambda path: -path.stat().st_mtime)
    for folder in (today, *others):
        if any(run.status for _, run in runs_needed(recipe.cells, options, folder)):
            return folder
    return today


def selected(recipe: Recipe, only: Sequence[str]) -> list[Cell]:
    """The cells whose row and column are named in `only`; all if it is empty.

    A name is that of a row, of a column, or of a part of either. On an axis that is named, one of
    its names has to match.
    """
    # the names of each cell: the parts of its row and column, and these as a whole
    names = [[*c.row.parts, *c.column.parts, *c.name] for c in recipe.cells]
    axes = [{*axis} for axis in zip(*names, strict=True)]
    for name in only:
        if not any(name in axis for axis in axes):
            known = ", ".join(sorted(set().union(*axes[:-2])))
            hint = did_you_mean(name, set().union(*axes))
            raise ValueError(f"--only {name!r}: {recipe.name} has {known}{hint}")
    wanted = [axis & {*only} for axis in axes]
    return [
        cell
        for cell, own in zip(recipe.cells, names, strict=True)
        if all(name in some for name, some in zip(own, wanted, strict=True) if some)
    ]
