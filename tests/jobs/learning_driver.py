"""The command line, for a separate process with its own Ray, in which even a small job trains drafters and uses them:
`python -m tests.jobs.learning_driver run --job JOB.json`."""

from ray.cloudpickle import register_pickle_by_value  # type: ignore[attr-defined]

from exspec.jobs import cli
from exspec.jobs.training import learning, planner

if __name__ == "__main__":
    learning.FEWEST, learning.SMALL, learning.FIRST, learning.WATCHED = 20, 0.0, 0.3, 0.2
    planner.SMALL, planner.SHORTEST, planner.TRIAL, planner.LEAST, planner.MARGIN = 0.0, 4.0, 0.2, 0.2, -1e9
    planner.Pilot.chance = 0.5
    planner.decided = lambda candidates: (candidates[1], "it is faster")
    register_pickle_by_value(planner)  # Ray's workers would import it as it is
    cli.main()
