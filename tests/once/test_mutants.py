"""The tests can see what they look for: with each fault the same story ends otherwise. All ten: `make mutants`."""

from pathlib import Path

import pytest
import redis

from pgqueue.embedded import ValkeyServer
from tests.mutants import MUTANTS
from tests.mutants.__main__ import ROOT
from tests.once.arena import Arena
from tests.once.inside import worker_inside
from tests.once.nursery import Nursery
from tests.once.proxy import proxied
from tests.once.test_commit import FENCED, GOOD, frozen_commit, verdict, zombie
from tests.once.test_commit import Story as CommitStory
from tests.once.test_concurrent import key_name
from tests.once.test_failpoints import CASES, Story

with_and_without = pytest.mark.parametrize("mutated", [False, True], ids=["sound", "mutated"])


@with_and_without
async def test_an_unfenced_finish(arena: Arena, monkeypatch: pytest.MonkeyPatch, mutated: bool) -> None:
    if mutated:
        MUTANTS["M1"].apply(monkeypatch.setattr)
    story = CommitStory(waits=True)
    async with arena.place() as place, worker_inside(story.app(), place.dsn) as runtime:
        found = await zombie(place, runtime, story)
    if mutated:
        # It ended the attempt of another, which goes on to have the effect again.
        assert (found["told"], found["effects"], found["status"]) == (["committed"], 1, "completed")
    else:
        assert found == FENCED


@with_and_without
async def test_setnx_before_execute(arena: Arena, nursery: Nursery, shared_valkey: ValkeyServer, mutated: bool) -> None:
    """The first attempt dies: the second finds its own mark, and skips."""
    [case] = [case for case in CASES if str(case) == "tx.begun-in_transaction-once"]
    async with arena.place() as place:
        with redis.Redis.from_url(shared_valkey.url) as client:
            client.delete(key_name("in_transaction", str(case)))
        outcome = await Story(case, place, nursery, shared_valkey.url, "M2" if mutated else None).run()
    assert (outcome.effects, outcome.end) == ((0 if mutated else 1), "completed")


@with_and_without
async def test_a_trusted_l1(arena: Arena, nursery: Nursery, shared_valkey: ValkeyServer, mutated: bool) -> None:
    async with arena.place() as place:
        with redis.Redis.from_url(shared_valkey.url) as client:
            client.set(key_name("unkeyed", "forged"), "1")
        id = await place.add("unkeyed", {"key": "forged"})
        worker = nursery.worker(
            place.dsn, mutant="M7" if mutated else None, redis_budget=10, REDIS_URL=shared_valkey.url, **place.env
        )
        [job] = await place.ended(id, processes=(worker,))
        worker.kill()
        await worker.ended()
        assert (place.sink.count("effects", "forged"), job["status"]) == ((0 if mutated else 1), "completed")


@with_and_without
async def test_a_plain_select_for_a_cut_commit(arena: Arena, monkeypatch: pytest.MonkeyPatch, mutated: bool) -> None:
    if mutated:
        MUTANTS["M8"].apply(monkeypatch.setattr)
    story = CommitStory(waits=True)
    async with arena.place() as place, proxied(place.dsn) as proxy:
        handlers = proxy.dsn(synchronous_commit="on")
        async with worker_inside(story.app(), place.dsn, handlers_dsn=handlers) as runtime:
            # With the mutant it takes a commit that is not decided for one that did not happen.
            assert await frozen_commit(place, proxy, story) == mutated
            if not mutated:
                assert await verdict(place, runtime, 1) == GOOD | {"result": {"by": 1}}


def test_every_mutant_names_a_test_that_is_there() -> None:
    for mutant in MUTANTS.values():
        file, _, name = mutant.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in Path(ROOT, file).read_text("utf-8"), mutant.name
