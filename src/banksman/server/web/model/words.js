// Format values as words for the timeline, the queue and the questions. Pure.

const PROMPT_CHARACTERS_MAX = 400;

/** The class of a priority. Any number is a priority; three of them have names. */
export function classOf(priority) {
  return priority >= 20 ? "interactive" : priority >= 10 ? "normal" : "background";
}

/** A prompt as text. It may be a string, or blocks of which some are pictures. */
export function promptText(prompt, max = PROMPT_CHARACTERS_MAX) {
  let words = "";
  if (typeof prompt === "string") words = prompt;
  else if (Array.isArray(prompt)) {
    words = prompt.map((block) => (typeof block?.text === "string" ? block.text : `[${textOf(block?.type) || "?"}]`)).join(" ");
  }
  return words.length > max ? `${words.slice(0, max - 1)}…` : words;
}

/** Describe how a process ended. Neither code nor signal: the end was not observed. */
export function exitText(code, signal) {
  if (signal !== null && signal !== undefined) return `signal ${signal}`;
  if (code !== null && code !== undefined) return `code ${code}`;
  return "exit status unknown";
}

/** Seconds as a readable duration. */
export function duration(seconds) {
  const value = Math.max(0, Number(seconds) || 0);
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return two(Math.floor(whole / 60), "min", whole % 60, "s");
  if (whole < 86400) return two(Math.floor(whole / 3600), "h", Math.floor((whole % 3600) / 60), "min");
  return two(Math.floor(whole / 86400), "d", Math.floor((whole % 86400) / 3600), "h");
}

function two(large, largeUnit, small, smallUnit) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

/** A duration in a few characters: only the largest unit. */
export function durationShort(seconds) {
  const value = Math.max(0, Number(seconds) || 0);
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  if (value < 86400) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

/** The local time of day, with `digits` fractional digits. */
export function clockTime(unix, digits = 0) {
  const date = new Date(unix * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const whole = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return digits ? `${whole}.${String(date.getMilliseconds()).padStart(3, "0").slice(0, digits)}` : whole;
}

/** The local time with the day. */
export function dayTime(unix) {
  const date = new Date(unix * 1000);
  const day = date.toLocaleDateString([], { day: "numeric", month: "short" });
  return `${day} ${clockTime(unix).slice(0, 5)}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/**
 * Convert any value to text. An agent's JSON may have any value in place of a string, also an
 * object with members called `toString` and `valueOf`, at which `String` would throw.
 * @param {unknown} value
 * @returns {string}
 */
export function textOf(value) {
  if (typeof value === "string") return value;
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/**
 * @param {unknown} value
 * @returns {Record<string, any>} the value if it is an object; else an empty object
 */
export function objectOf(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? value : {};
}
