// graphile-worker: BENCH_BATCHED=1 switches its local queue and its batched completions on.
// `node with_graphile.mjs worker` runs a worker; everything else is a measure of the producer.

import { makeWorkerUtils, run, runMigrations } from "graphile-worker";
import * as driver from "./driver.mjs";

const CONCURRENT = 24;
const quiet = { error: console.error, warning: () => {}, info: () => {}, debug: () => {} };
const { Logger } = await import("graphile-worker");
const logger = new Logger(() => (level, message) => level === "error" && quiet.error(message));

// As its performance page and its own performance test have it.
const batched = { localQueue: { size: 500, refetchDelay: { durationMs: 10 } }, completeJobBatchDelay: 0, failJobBatchDelay: 0 };

const preset = {
  worker: {
    connectionString: driver.DSN,
    concurrentJobs: CONCURRENT,
    maxPoolSize: CONCURRENT + 1,
    pollInterval: 1000,
    logger,
    ...(process.env.BENCH_BATCHED === "1" ? batched : {}),
  },
};

const taskList = {
  noop: () => {},
  count: () => driver.count(),
  stamp: ({ number }) => driver.stamp(number),
  hold: ({ number }) => driver.hold(number),
};

const producer = {
  async open() {
    this.utils = await makeWorkerUtils({ connectionString: driver.DSN, maxPoolSize: 8, logger });
  },
  add(job, number) {
    return this.utils.addJob(job, { number });
  },
  async addMany(job, jobs) {
    for (let start = 0; start < jobs; start += 1000) {
      const size = Math.min(1000, jobs - start);
      await this.utils.addJobs(Array.from({ length: size }, () => ({ identifier: job, payload: {} })));
    }
  },
  addAt(job, number, at) {
    return this.utils.addJob(job, { number }, { runAt: new Date(at * 1000) });
  },
  async close() {
    await this.utils.release();
  },
};

if (process.argv[2] === "worker") {
  const runner = await run({ preset, taskList });
  await runner.promise;
} else {
  if (process.argv[2] === "setup") await runMigrations({ connectionString: driver.DSN, logger });
  await driver.main(producer);
}
