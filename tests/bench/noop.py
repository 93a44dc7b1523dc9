"""An app whose only job does nothing."""

from pgqueue import PgQueue

app = PgQueue()


@app.job(name="noop")
async def noop() -> None:
    pass
