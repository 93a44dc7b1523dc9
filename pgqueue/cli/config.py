"""`pgqueue config`: every setting, its value and its source."""

import json

import click

from pgqueue.settings import Settings


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Show every setting and where it comes from; secrets are masked."""
    rows = Settings.from_env().describe()
    if as_json:
        click.echo(json.dumps([{"name": name, "value": value, "source": source} for name, value, source in rows]))
        return
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, source in rows:
        click.echo(f"{name:{widths[0]}}  {value or '-':{widths[1]}}  {source}")
