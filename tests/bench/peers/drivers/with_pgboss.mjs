// pg-boss. `node with_pgboss.mjs worker` runs a worker; everything else is a measure of the producer.

import { PgBoss } from "pg-boss";
import * as driver from "./driver.mjs";

const JOBS = ["noop", "count", "stamp", "hold"];
const BATCH = 1000;

const working = process.argv[2] === "worker";
const boss = new PgBoss({
  connectionString: driver.DSN,
  useListenNotify: true,
  supervise: working,
  schedule: false,
  ...(working ? {} : { max: 8 }),
  ...(working && driver.LEASE ? { superviseIntervalSeconds: 5, monitorIntervalSeconds: 5 } : {}),
});
boss.on("error", console.error);

async function work() {
  const options = { batchSize: BATCH, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5, notifyPollingIntervalSeconds: 0.5 };
  await boss.work("noop", options, async () => {});
  await boss.work("count", options, async (jobs) => jobs.forEach(() => driver.count()));
  await boss.work("stamp", options, async (jobs) => jobs.forEach((job) => driver.stamp(job.data.number)));
  await boss.work("hold", { localConcurrency: 4 }, ([job]) => driver.hold(job.data.number));
}

const producer = {
  async open() {
    await boss.start();
    if (process.argv[2] !== "setup") return;
    const lease = driver.LEASE ? { heartbeatSeconds: Math.max(10, Number(driver.LEASE)) } : {};
    for (const job of JOBS) await boss.createQueue(job, { notify: true, retryDelay: 0, ...lease });
  },
  add(job, number) {
    return boss.send(job, { number });
  },
  async addMany(job, jobs) {
    for (let start = 0; start < jobs; start += BATCH) {
      const size = Math.min(BATCH, jobs - start);
      await boss.insert(job, Array.from({ length: size }, () => ({})));
    }
  },
  addAt(job, number, at) {
    return boss.send(job, { number }, { startAfter: new Date(at * 1000) });
  },
  async close() {
    await boss.stop({ graceful: false });
  },
};

if (working) {
  await boss.start();
  await work();
  process.on("SIGTERM", () => process.exit(0));
} else {
  await driver.main(producer);
}
