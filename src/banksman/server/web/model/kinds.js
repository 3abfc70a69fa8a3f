// Tell frames (the traffic of the agent's pipes) from Banksman's own events.
// @ts-check

const FRAMES = new Set(["update", "recited", "sent"]);

/** @param {{kind: string}} event */
export function isOwn(event) {
  return !FRAMES.has(event.kind);
}
