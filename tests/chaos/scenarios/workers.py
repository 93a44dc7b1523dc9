"""Workers that die, stop, and come back."""

from tests.chaos.lab import Lab
from tests.chaos.registry import scenario
from tests.chaos.verdict import Verdict, judge


@scenario("C0", "nothing goes wrong", invariant="the harness itself: every job once", minute=True)
async def c0(lab: Lab) -> Verdict:
    ground = await lab.ground()
    lab.sink()
    lab.worker(ground)
    types = ("effect", "threaded", "keyed", "mail")
    await lab.produce(ground, [(types[n % 4], {"key": key}) for n, key in enumerate(lab.keys(200))])
    await ground.settled()
    return await judge(lab, ground)
