"""A fleet may differ: this app knows a type that sample_app does not."""

from pgqueue import Context, PgQueue

app = PgQueue()


@app.job
async def rare(ctx: Context) -> str:
    return "rare"
