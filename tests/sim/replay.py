"""Run one random schedule of the simulation again: ``python -m tests.sim.replay --seed N``."""

import argparse
import sys

from tests.sim.schedule import arrange, heal, judge, schedule_of
from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--trace", type=int, default=0, metavar="N", help="print the last N events (-1: all)")
    options = parser.parse_args()

    schedule = schedule_of(options.seed)
    print(schedule.scenario)
    world = World(schedule.scenario)
    print(*schedule.faults, *(f"then: {fault}" for fault in schedule.later), sep="\n")
    arrange(world, schedule.faults)
    try:
        print(world.run())
        judge(world)
        heal(world, schedule.later)
    finally:
        print("\n".join(f"{record.severity:8} {record.event:15} {record.detail}" for record in world.records))
        if options.trace:
            print("\n".join(world.trace[-options.trace if options.trace > 0 else 0 :]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
