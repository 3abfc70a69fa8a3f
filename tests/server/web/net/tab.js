// A tab in a separate thread. A test can freeze it while it holds the lock, as browsers freeze hidden tabs.
import { parentPort, workerData } from "node:worker_threads";
import { Feed } from "../../../../src/banksman/server/web/net/feed.js";

const cell = new Int32Array(workerData.shared);
const feed = new Feed({ ...workerData.surroundings, fetch, locks: navigator.locks, now: Date.now });
feed.on((events) => parentPort.postMessage({ events }));
feed.connection.subscribe((connection) => parentPort.postMessage({ connection }));
parentPort.on("message", (word) => {
  if (word === "freeze") {
    parentPort.postMessage({ frozen: true });
    Atomics.wait(cell, 0, 0);
  } else if (word === "stop") {
    feed.stop();
    parentPort.close();
  }
});
feed.start();
