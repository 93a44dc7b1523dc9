// The same as driver.py, for the peers that run on Node.

import { appendFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

export const DSN = process.env.DATABASE_URL;
export const LEASE = process.env.BENCH_LEASE;
export const HELD = 3600;
const PART = Number(process.env.BENCH_PART ?? 20000);
const SENDERS = 8;

const now = () => (performance.timeOrigin + performance.now()) / 1000;
let counter = 0;

export function stamp(number) {
  appendFileSync(process.env.BENCH_STAMPS, `${number} ${now().toFixed(6)} ${process.pid}\n`);
}

export function count() {
  if (++counter % PART === 0) {
    appendFileSync(process.env.BENCH_COUNTS, `${counter} ${now().toFixed(6)} ${process.pid}\n`);
  }
}

export async function hold(number) {
  stamp(number);
  await sleep(HELD * 1000);
}

// The producer has open, add, addMany, addAt and close, all of them async.
export async function main(producer) {
  const [what, ...numbers] = process.argv.slice(2);
  await producer.open();
  const found = await measures[what](producer, ...numbers.map(Number));
  await producer.close();
  // A pipe takes 64 KiB at a time: the process must not end before it has taken the rest.
  process.stdout.write(`${JSON.stringify(found)}\n`, () => process.exit(0));
}

const measures = {
  setup: async () => ({}),

  async add(producer, jobs) {
    await producer.add("noop", 0);
    const started = performance.now();
    for (let number = 0; number < jobs; number++) await producer.add("noop", number);
    return { seconds: (performance.now() - started) / 1000 };
  },

  async add_many(producer, jobs) {
    await producer.add("noop", 0);
    const started = performance.now();
    await producer.addMany("noop", jobs);
    return { seconds: (performance.now() - started) / 1000 };
  },

  async stamps(producer, jobs, first, rate) {
    const sent = [];
    const send = async (number) => {
      const before = now();
      await producer.add("stamp", number);
      sent.push([number, before, now()]);
    };
    if (rate) {
      await atRate(jobs, rate, (n) => send(first + n));
    } else {
      for (let n = 0; n < jobs; n++) {
        await send(first + n);
        await sleep(10 + Math.random() * 20);
      }
    }
    return { sent };
  },

  async schedule(producer, jobs, first, seconds) {
    const due = {};
    for (let number = first; number < first + jobs; number++) {
      due[number] = now() + 2 + Math.random() * seconds;
      await producer.addAt("stamp", number, due[number]);
    }
    return { due };
  },

  async hold(producer, jobs, first) {
    for (let n = 0; n < jobs; n++) await producer.add("hold", first + n);
    return {};
  },
};

// Each begins at its time; who finds all senders busy waits for one.
async function atRate(jobs, rate, send) {
  const started = performance.now();
  const waiting = [];
  let sent = 0;
  let busy = 0;
  await new Promise((done) => {
    const next = () => {
      while (busy < SENDERS && waiting.length) {
        busy++;
        send(waiting.shift()).then(() => {
          busy--;
          if (++sent === jobs) done();
          else next();
        });
      }
    };
    let begun = 0;
    const tick = () => {
      const due = Math.min(jobs, Math.floor(((performance.now() - started) / 1000) * rate) + 1);
      while (begun < due) waiting.push(begun++);
      next();
      if (begun < jobs) setTimeout(tick, 1);
    };
    tick();
  });
}
