"""Server-sent events: the present, coalesced, resumable, and only as long as the token is good."""

import http.client
import json
import time
from typing import Any

from tests.api.conftest import Api

PATH = "/api/v1/stream"


class Stream:
    def __init__(self, api: Api, last: str = "", token: str | None = None) -> None:
        # After a look that took two seconds the next one comes twenty later.
        self.connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)
        headers = {"Authorization": f"Bearer {token or api.token}"} | ({"Last-Event-ID": last} if last else {})
        self.connection.request("GET", PATH, headers=headers)
        self.response = self.connection.getresponse()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.response.close()
        self.connection.close()

    def event(self) -> dict[str, Any]:
        """The next one that is not a comment."""
        found: dict[str, Any] = {}
        while True:
            line = self.response.readline().decode()
            assert line, "the stream has ended"
            if line == "\n" and "data" in found:
                return found | {"data": json.loads(found["data"])}
            name, _, value = line.rstrip("\n").partition(": ")
            if name in ("id", "event", "data"):
                found[name] = value


def test_the_present_and_what_changes(api: Api) -> None:
    api("POST", "/submit_job", {"name": "default"})
    with Stream(api) as stream:
        assert stream.response.status == 200
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        first = stream.event()
        assert first["event"] == "state"
        assert first["data"]["jobs"] == {"pending": 1, "scheduled": 0, "running": 0, "failed": 0}
        begun = time.monotonic()
        for _ in range(50):
            api("POST", "/submit_job", {"name": "default"})
        events = 0
        while stream.event()["data"]["jobs"]["pending"] != 51:
            events += 1
        assert events <= time.monotonic() - begun + 2, "coalesced: once a second"


def test_it_goes_on_where_it_ended(api: Api) -> None:
    with Stream(api) as stream:
        seen = stream.event()
    with Stream(api, last=seen["id"]) as stream:
        api("POST", "/submit_job", {"name": "default"})
        assert stream.event()["id"] != seen["id"], "what the client has does not come again"
    with Stream(api, last=seen["id"]) as stream:
        assert stream.event()["data"]["jobs"]["pending"] == 1, "what it missed comes at once"
    with Stream(api, last="\t odd ") as stream:
        assert stream.event()["event"] == "state"


def test_many_streams_one_look(api: Api) -> None:
    assert api.state
    tokens = [api.make_token(subject=f"s{n}") for n in range(4)]
    streams = [Stream(api, token=token) for token in tokens for _ in range(10)]
    try:
        for stream in streams:
            stream.event()
        looks, begun = api.state.tail.looks, time.monotonic()
        time.sleep(1.5)
        assert api.state.tail.looks - looks <= (time.monotonic() - begun) + 1
        with Stream(api, token=tokens[0]) as eleventh:
            assert eleventh.response.status == 429
    finally:
        for stream in streams:
            stream.__exit__()


def test_it_ends_with_the_token(api: Api) -> None:
    made = api("POST", "/api/v1/tokens", {"subject": "s", "scopes": ["jobs:read"]}).json
    with Stream(api, token=made["token"]) as stream:
        stream.event()
        api("POST", "/api/v1/tokens/revoke", {"jti": made["jti"]})
        while (event := stream.event())["event"] != "end":
            pass
        assert event["data"] == {"reason": "the token was revoked"}
    with Stream(api, token=made["token"]) as stream:
        assert stream.response.status == 401


def test_a_confined_token_sees_its_queues(api: Api) -> None:
    for queue in ("mail", "pay"):
        api("POST", "/submit_job", {"name": "default", "queue": queue})
    with Stream(api, token=api.make_token(queues=["mail"])) as stream:
        data = stream.event()["data"]
        assert [queue["queue"] for queue in data["queues"]] == ["mail"]
        assert data["jobs"]["pending"] == 1
        assert "workers" not in data
