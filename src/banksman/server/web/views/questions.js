// Cards for open questions, right above the composer, answered by a click or a key.
//
// A question has one answer: the first one counts. So a card is removed only when the log says that
// the question is over. If it was answered elsewhere, in another tab or by a rule, the card says so
// for a while before it is removed. A key answers the first card, or the focused one. Neither a key
// nor a click answers a card that was just drawn or just moved: the user meant the previous content
// of that place.

import { el, isComposing, keyed, set } from "../dom.js";
import { answeredText, choiceFor, choicesOf, entered, fieldsOf, fold, keysOf, titleOf } from "../model/questions.js";
import { clockTime } from "../model/words.js";
import { formOf } from "./questions/form.js";
import { shownOf } from "./questions/shown.js";

const READ_MILLISECONDS = 400;
const GOING_MILLISECONDS = 6000;
// More answers than one page can show.
const KNOWN_MAX = 200;

/** @type {Cards|null} the cards that keys answer */
let current = null;

/** Handle a key that may answer a question. @returns {boolean} whether it did */
export function answerByKey(key) {
  return current?.press(key) ?? false;
}

/**
 * @param {HTMLElement} parent
 * @param {any} context
 */
export function mountQuestions(parent, context) {
  const cards = new Cards(context);
  parent.append(cards.section);
  current = cards;
  const off = context.own.events.subscribe((events) => cards.take(events));
  return () => {
    off();
    cards.destroy();
    if (current === cards) current = null;
  };
}

/**
 * Return the question if a card can be made of it. Else return a minimal question with the raw
 * content. An unreadable question must not hide the others, and the user must be able to deny it.
 */
function readable(question) {
  try {
    titleOf(question);
    choicesOf(question);
    shownOf(question);
    const fields = fieldsOf(question);
    if (fields !== null) formOf(fields);
    return question;
  } catch (error) {
    (globalThis.reportError ?? console.error)(error);
    const { id, turn, seq, at, tool, ...rest } = question;
    return { id, turn, seq, at, tool, wants: "permission", input: { asked: rest }, details: {} };
  }
}

class Cards {
  constructor(context) {
    this.context = context;
    this.section = el("section", { class: "questions", "aria-label": "Questions", hidden: true });
    /**
     * @type {Map<string, any>} the shown cards by question id: open, or over and about to be removed
     */
    this.shown = new Map();
    this.timers = new Set();
    // The time at which a card was last answered or ended, so that the next one took its turn.
    this.changedAt = -Infinity;
  }

  /** Whether this card has been in its place long enough to be read. */
  _isRead(card) {
    return performance.now() - Math.max(this.changedAt, card.seenAt) >= READ_MILLISECONDS;
  }

  /** Redraw when the cards may be answered. */
  _drawWhenRead() {
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      this.draw();
    }, READ_MILLISECONDS);
    this.timers.add(timer);
  }

  _moved() {
    this.changedAt = performance.now();
    this._drawWhenRead();
  }

  destroy() {
    for (const timer of this.timers) clearTimeout(timer);
    this.section.remove();
  }

  take(events) {
    const { open, answered } = fold(events);
    const known = new Set(open.map((each) => each.id));
    const fresh = open.filter((each) => !this.shown.has(each.id)).map(readable);
    for (const question of fresh)
      this.shown.set(question.id, { question, state: "open", isOurs: false });
    for (const [id, card] of this.shown) {
      if (card.state !== "over" && !known.has(id)) this._end(card, answered.get(id) ?? null);
    }
    if (fresh.length) this._announce(fresh);
    this.draw();
  }

  _announce(fresh) {
    const words = fresh.map((each) => titleOf(each).replace(/[^?.!]$/u, "$&.")).join(" ");
    const keys = fieldsOf(fresh[0]) === null && this.context.mayAnswer !== false ? " Press a to allow, d to deny." : "";
    this.context.say(`A question waits: ${words}${keys}`, "question");
  }

  _end(card, answered) {
    card.state = "over";
    this._moved();
    card.answered = answered;
    // Before the response arrives, it is unknown whose answer was first.
    if (card.isOnItsWay) card.words = "Sent…";
    else this._tellEnd(card, answered);
  }

  _tellEnd(card, answered) {
    card.words =
      answered === null ? "The question is over." : card.isOurs ? "" : `Answered elsewhere: ${answeredText(answered)}.`;
    if (card.words === "") return this._drop(card);
    this.context.say(`${titleOf(card.question).replace(/[?.]?$/u, ":")} ${card.words}`, "note");
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      this._drop(card);
      this.draw();
    }, GOING_MILLISECONDS);
    this.timers.add(timer);
    return undefined;
  }

  _drop(card) {
    this.shown.delete(card.question.id);
    // After an answer by keyboard, focus the next question or the composer.
    if (!card.node?.contains(document.activeElement)) return;
    const next = [...this.shown.values()].find((each) => each.state === "open" && each.node);
    const target = next?.buttons[0] ?? document.querySelector('textarea[aria-label="Message"]');
    target?.focus();
  }

  draw() {
    const cards = [...this.shown.values()].slice(0, KNOWN_MAX);
    this.section.hidden = cards.length === 0;
    keyed(
      this.section,
      cards,
      (card) => card.question.id,
      (card) => this._make(card),
      (node, card) => this._update(node, card, cards),
    );
  }

  _make(card) {
    const { question } = card;
    // A caller that may not answer sees the question, without buttons and fields.
    const mayAnswer = this.context.mayAnswer !== false;
    const choices = mayAnswer ? choicesOf(question) : [];
    const fields = mayAnswer ? fieldsOf(question) : null;
    // A hidden tab draws no frames. The time begins when the tab is visible.
    card.seenAt = Infinity;
    requestAnimationFrame(() => {
      card.seenAt = performance.now();
      this._drawWhenRead();
    });
    card.form = fields === null ? null : formOf(fields);
    card.choices = choices;
    card.message = el("input", {
      type: "text",
      class: "question-message",
      "aria-label": "Reason for the agent",
      placeholder: "Reason for the agent (optional)",
    });
    card.note = el("p", { class: "question-note", role: "status" });
    card.buttons = choices.map((choice) => this._button(card, choice));
    const title = el("h2", { id: `title-${question.id}` }, titleOf(question));
    card.place = el("span", { class: "question-count" });
    card.node = el(
      "article",
      { class: "question", dataset: { question: question.id }, "aria-labelledby": `title-${question.id}` },
      el(
        "div",
        { class: "question-top" },
        title,
        card.place,
        el(
          "button",
          {
            type: "button",
            class: "question-when",
            title: "Show it in the transcript",
            on: { click: () => this.context.jump(question.seq) },
          },
          clockTime(question.at),
        ),
      ),
      el("div", { class: "question-body" }, shownOf(question), card.form?.node ?? null),
      mayAnswer
        ? el("div", { class: "question-actions" }, card.buttons, card.form === null ? card.message : null)
        : el("p", { class: "question-note" }, "It waits for a person who may answer."),
      card.note,
    );
    card.message.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !isComposing(event)) this._answer(card, choiceFor("d", choices));
    });
    card.form?.node.addEventListener("submit", () => this._answer(card, choices[0]));
    return card.node;
  }

  _button(card, choice) {
    const keys = keysOf(choice, card.choices);
    return el(
      "button",
      {
        type: "button",
        class: `question-button${choice.allows ? " is-yes" : " is-no"}${choice.isLasting ? " is-lasting" : ""}`,
        "aria-keyshortcuts": keys.join(" "),
        on: { click: () => this._isRead(card) && this._answer(card, choice) },
      },
      choice.label,
      el("kbd", { "aria-hidden": "true" }, keys[0] ?? ""),
    );
  }

  _update(node, card, cards) {
    const isOver = card.state === "over";
    const isSent = card.state === "sent";
    for (const button of card.buttons) {
      button.disabled = isOver || isSent;
      // Not `disabled`: the next button to get the focus would lose it.
      set(button, { "aria-disabled": isOver || isSent || this._isRead(card) ? null : "true" });
    }
    card.message.disabled = isOver || isSent;
    node.toggleAttribute("data-over", isOver);
    const words = isOver ? card.words : isSent ? "Sent…" : (card.problem ?? "");
    if (card.note.textContent !== words) card.note.textContent = words;
    set(card.note, { class: `question-note${card.problem && !isOver ? " is-problem" : ""}` });
    const open = cards.filter((each) => each.state !== "over");
    card.place.textContent = open.length > 1 && !isOver ? `${open.indexOf(card) + 1} of ${open.length}` : "";
  }

  press(key) {
    const open = [...this.shown.values()].filter((card) => card.state === "open");
    const card = open.find((each) => each.node?.contains(document.activeElement)) ?? open[0];
    const choice = card ? choiceFor(key, card.choices) : null;
    if (!card || choice === null) return false;
    if (this._isRead(card)) this._answer(card, choice);
    return true;
  }

  async _answer(card, choice) {
    if (card.state !== "open" || choice === null) return;
    let more = {};
    if (card.form !== null && choice.allows) {
      const values = card.form.read();
      if (values === null) return;
      more = entered(card.question, values);
    }
    const message = card.message.value.trim();
    if (!choice.allows && message !== "" && card.form === null) more.message = message;
    if (choice.remember) more.remember = true;
    card.state = "sent";
    card.problem = null;
    card.isOurs = card.isOnItsWay = true;
    this._moved();
    this.draw();
    try {
      const answered = await this.context.actions.answer(this.context.id, card.question.id, choice.decision, more);
      card.isOnItsWay = false;
      this._answered(card, choice, answered);
    } catch (error) {
      card.isOnItsWay = false;
      if (card.state === "over") {
        card.isOurs = false;
        this._tellEnd(card, card.answered);
        this.draw();
        return;
      }
      card.state = "open";
      card.isOurs = false;
      card.problem = [error.detail ?? error.message, error.hint].filter(Boolean).join(": ");
      this.draw();
    }
  }

  _answered(card, choice, answered) {
    if (answered && answered.first === false) {
      // The log reports the answer too, and the card then says who answered.
      card.isOurs = false;
      if (card.state === "over") this._tellEnd(card, card.answered ?? answered);
      else this._end(card, answered);
    } else {
      if (card.state === "over") this._drop(card);
      this.context.say(card.form === null ? `Answered: ${choice.label}.` : "Answered.", "done");
    }
    this.draw();
  }
}
