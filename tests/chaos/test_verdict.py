"""The judge sees what it is there for."""

from types import SimpleNamespace

import pytest

from tests.chaos.handlers import EFFECTS
from tests.chaos.lab import Ground
from tests.chaos.ledger import Ledger
from tests.chaos.monitor import AUDIT
from tests.chaos.verdict import judge

# key, status, what stands in the table of effects, whether it was tried and acknowledged, and what the judge says
CASES = {
    "done": ("completed", 1, True, True, {}),
    "not acknowledged": ("completed", 1, True, False, {"recovered": 1}),
    "refused": (None, 0, True, False, {}),
    "cancelled": ("cancelled", 0, True, True, {"lost": 1}),
    "in doubt": ("failed", 0, True, True, {"lost": 1}),
    "no row": (None, 0, True, True, {"lost": 1, "problems": ["1 acknowledged jobs have no row"]}),
    "no effect": ("completed", 0, True, True, {"lost": 1, "problems": ["1 jobs are completed without an effect"]}),
    "silent": ("completed", 0, True, False, {"problems": ["1 jobs are completed without an effect"]}),
    "twice": ("completed", 2, True, True, {"duplicated": 1}),
    "nobody's": ("completed", 1, False, False, {"unexpected": 1}),
    "half done": (
        "cancelled",
        1,
        True,
        True,
        {"problems": ["1 effects are there, and their jobs are not completed"]},
    ),
    "left": ("pending", 0, True, True, {"lost": 1, "problems": ["jobs that have not ended: {'pending': 1}"]}),
}


@pytest.mark.parametrize("name", CASES)
async def test_the_judge(name, dsn, conn, tmp_path):
    status, effects, attempted, acknowledged, said = CASES[name]
    verdict = await judged(dsn, conn, tmp_path, "effect", status, effects, attempted, acknowledged)
    buckets = ("lost", "duplicated", "unexpected", "recovered", "problems")
    assert {bucket: value for bucket in buckets if (value := getattr(verdict, bucket))} == said
    assert verdict.ok == (said.keys() <= {"recovered"})


async def test_what_is_excused(dsn, conn, tmp_path):
    """A doubt about what must not happen twice, once for a fault; what an operator cancelled."""
    for doubts in (0, 1):
        verdict = await judged(dsn, conn, tmp_path / str(doubts), "mail", "failed", 0, True, True, doubts=doubts)
        assert (verdict.lost, verdict.ok) == (0, doubts == 1)
        await conn.execute("DROP TABLE public.effects, public.moves CASCADE; DROP FUNCTION public.note_move CASCADE")
        await conn.execute("DELETE FROM pgqueue.jobs")
    await conn.execute("INSERT INTO pgqueue.jobs (id, type, payload) VALUES (1, 'effect', '{\"key\": \"k\"}')")
    await conn.execute("SELECT pgqueue.cancel_job(1, 'why')")
    verdict = await judged(dsn, conn, tmp_path, "effect", None, 0, True, True)
    assert (verdict.lost, verdict.ok) == (0, True)


async def judged(dsn, conn, folder, type, status, effects, attempted, acknowledged, **allowed):
    await conn.execute(EFFECTS)
    await conn.execute(AUDIT)
    ledger = Ledger(folder)
    ledger.attempt(["k"] * attempted)
    ledger.acknowledge(["k"] * acknowledged)
    if status is not None:
        await conn.execute(INSERT, [type, status])
    for _ in range(effects):
        await conn.execute("INSERT INTO public.effects VALUES ('k', (SELECT id FROM pgqueue.jobs))")
    ground = Ground(dsn, conn, None)
    ground.audited = True
    verdict = await judge(SimpleNamespace(ledger=ledger, sink_calls=list), ground, **allowed)
    ledger.close()
    return verdict


INSERT = """
INSERT INTO pgqueue.jobs (id, type, payload, status, finished_at, reason)
SELECT 1, t, '{"key": "k"}', s, CASE WHEN s <> 'pending' THEN now() END, CASE s WHEN 'failed' THEN 'in_doubt' END
FROM (SELECT %s AS t, %s::pgqueue.status AS s) given
"""
