"""Parts that are dealt out: which one a process does, by its options or by what launched it."""

import pytest

from fp4convert.errors import InputError
from fp4convert.execution.share import Share, choose_share, find_share

SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_ARRAY_TASK_STEP": "2",
}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # srun in each job of an array


@pytest.mark.parametrize(
    ("index", "count", "environment", "expected"),
    [
        (None, None, {}, None),
        (None, 1, {}, None),
        (0, 1, {}, None),
        (0, 3, {}, (0, 3)),
        (2, 3, SRUN, (2, 3)),
        (None, None, SRUN, (2, 4)),
        (None, None, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script, not srun
        (None, None, ARRAY, None),  # it may convert another model in each
        (None, 4, ARRAY, (3, 4)),
        (None, 4, {**ARRAY, **STEP}, (3, 4)),
        (None, None, {**ARRAY, **STEP}, None),
        (1, None, SRUN, (1, 4)),
        (
            None,
            None,
            {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "a\nb"},
            (1, 2),
        ),
        (None, None, {"RANK": "5", "WORLD_SIZE": "8"}, (5, 8)),
        (None, None, {**STEP, "RANK": "5", "WORLD_SIZE": "8"}, (5, 8)),  # torchrun under srun
        (None, None, {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (None, 1, {"RANK": "5", "WORLD_SIZE": "8"}, None),
        (None, None, {"RANK": "gold", "WORLD_SIZE": "8"}, None),
        (None, None, {"JOB_COMPLETION_INDEX": "3"}, None),
        (None, 6, {"JOB_COMPLETION_INDEX": "3"}, (3, 6)),
        (1, None, {"RANK": "5", "WORLD_SIZE": "8"}, (1, 8)),
    ],
)
def test_the_part_is_what_options_or_the_launcher_say(index, count, environment, expected):
    share = find_share(index, count, environment)
    assert (share and (share.index, share.count)) == expected


@pytest.mark.parametrize(
    ("index", "count", "environment"),
    [
        (0, None, {}),
        (None, 4, {}),
        (4, 4, {}),
        (-1, 4, {}),
        (0, 0, {}),
        (1, 1, {}),
        (None, 2, {"JOB_COMPLETION_INDEX": "3"}),
        (None, 4, {**ARRAY, "SLURM_ARRAY_TASK_ID": "8"}),
        (None, 4, {**ARRAY, "SLURM_ARRAY_TASK_ID": "9"}),
        (None, 8, SRUN),
    ],
)
def test_half_a_part_or_one_that_cannot_be_is_refused(index, count, environment):
    with pytest.raises(InputError) as caught:
        find_share(index, count, environment)
    assert "--shard-index" in caught.value.next_step


def test_a_process_that_joins_has_no_part():
    assert choose_share(True, None, None, SRUN) is None
    with pytest.raises(InputError):
        choose_share(True, 0, 4, {})


def test_every_task_is_in_one_part():
    tasks = list(range(11))
    parts = [list(Share(index, 4).of(tasks)) for index in range(4)]
    assert sorted(task for part in parts for task in part) == tasks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
