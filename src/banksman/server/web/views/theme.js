// Light or dark: the system setting, until the user chooses. The choice is kept in this browser.
// @ts-check

import { signal } from "../model/signal.js";

const KEY = "banksman.theme";

export function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = read();
  const now = signal(chosen ?? (system.matches ? "dark" : "light"));
  if (chosen) document.documentElement.dataset.theme = chosen;
  system.addEventListener("change", () => {
    if (!read()) now.value = system.matches ? "dark" : "light";
  });
  return {
    now,
    toggle() {
      const next = now.value === "dark" ? "light" : "dark";
      now.value = next;
      document.documentElement.dataset.theme = next;
      write(next);
    },
  };
}

/** @returns {string|null} */
function read() {
  try {
    const value = localStorage.getItem(KEY);
    return value === "dark" || value === "light" ? value : null;
  } catch {
    return null;
  }
}

/** @param {string} value */
function write(value) {
  try {
    localStorage.setItem(KEY, value);
  } catch {
    // No storage: the choice lasts as long as the page.
  }
}
