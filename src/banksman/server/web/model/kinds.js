// Which events are frames (what went over the agent's pipes) and which are our own.
// @ts-check

const FRAMES = new Set(["update", "recited", "sent"]);

/** @param {{kind: string}} event */
export function isOwn(event) {
  return !FRAMES.has(event.kind);
}
