"""All benchmarks, one after the other; a few minutes."""

from tests.bench import floors, inserters, statements, worker
from tests.bench.common import benchmark_server

with benchmark_server() as server:
    statements.run(server)
    floors.run(server)
    inserters.run(server)
    worker.run(server)
