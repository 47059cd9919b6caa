/* One question and its answer, as they are drawn. A turn is data: {text, images, answer, reasoning, cut, stopped,
   isDone, error, times, usage, sources}; drawing it again shows what has changed. */
import {$, button, copyButton, element, icon} from "./dom.js";
import {thumbnails} from "./images.js";
import {markdown} from "./markdown.js";

const STAGES = ["fetch", "encode", "transfer", "queue", "prefill"];
const SOURCES = {computed: "encoded", memory: "cached", redis: "cached (Redis)", joined: "shared"};

export class TurnView {
  /* `onEdit`, `onAgain`, `onSettings`: what the buttons do. */
  constructor(turn, {onEdit, onAgain, onSettings}) {
    this.turn = turn;
    this.question = element("li", "turn user");
    if (turn.images.length) this.question.append(element("div", "images", ...thumbnails(turn.images)));
    const edit = element("div", "actions", button("quiet edit", "Edit question", onEdit, icon("edit")));
    this.question.append(element("div", "asked", edit, ...(turn.text ? [element("div", "bubble", turn.text)] : [])));

    this.reasoning = element("details", "reasoning", element("summary", "", "Reasoning"), element("div"));
    this.bubble = element("div", "bubble markdown");
    this.note = element("p", "note");
    this.times = element("details", "times");
    const again = button("quiet again", "Regenerate answer", onAgain, icon("again"));
    this.actions = element("div", "actions", copyButton("Copy answer", () => turn.answer), again);
    this.error = element("div", "error");
    this.error.setAttribute("role", "alert");
    this.buttons = {again: onAgain, edit: onEdit, settings: onSettings};
    this.answer = element("li", "turn assistant", this.reasoning, this.bubble, this.note, this.error,
      element("div", "below", this.actions, this.times));
  }

  /* Draws what the turn is now; `isRunning`: more is to come. */
  draw(isRunning = false) {
    const {turn} = this, reasoning = this.reasoning.lastChild;
    this.answer.setAttribute("aria-busy", String(isRunning));
    this.reasoning.hidden = !turn.reasoning;
    if (reasoning.textContent.length !== turn.reasoning.length) reasoning.textContent = turn.reasoning;
    markdown(this.bubble, turn.answer);
    this.bubble.hidden = !turn.answer && !isRunning;
    this.bubble.classList.toggle("waiting", isRunning && !turn.answer);
    this.bubble.classList.toggle("running", isRunning && !!turn.answer);
    const note = isRunning ? "" : this._note();
    this.note.textContent = note;
    this.note.hidden = !note;
    this.actions.hidden = isRunning;
    this.actions.firstChild.hidden = !turn.answer;
    this.actions.lastChild.hidden = !!turn.error;   // which has a button for it
    this._drawError(isRunning ? null : turn.error);
    this.times.hidden = isRunning || !turn.times;
    if (!this.times.hidden && !this.times.firstChild) this.times.append(...drawTimes(turn));
    if (isRunning) this.times.replaceChildren();
  }

  _note() {
    const {answer, cut, stopped, isDone, error} = this.turn;
    if (cut) return "The answer is cut off: it reached the token limit.";
    if (stopped) return answer ? "You stopped this answer." : "You stopped this question before its answer.";
    if (answer || error) return "";
    return isDone ? "The model's answer is empty." : "There is no answer: the page was closed before it ended.";
  }

  _drawError(error) {
    this.error.hidden = !error;
    if (!error) { this.error.replaceChildren(); return; }
    if (this.error.firstChild) return;
    const {again, edit, settings} = this.buttons;
    const act = (label, onclick) => button("", label, onclick);
    this.error.append(
      element("p", "", element("strong", "", error.what), " " + error.next),
      element("div", "buttons", ...(error.needsKey ? [act("Enter a key", settings)] : []), act("Try again", again), act("Edit question", edit)));
    if (error.details) this.error.append(element("details", "", element("summary", "", "Details"), element("code", "", error.details)));
  }
}

function milliseconds(value) {
  return value >= 1000 ? (value / 1000).toFixed(2) + " s" : value.toFixed(value < 10 ? 1 : 0) + " ms";
}

/* Tokens per second after the first. */
function speed({times, usage}) {
  const seconds = (times.total - times.first_token) / 1000, tokens = (usage?.completion_tokens ?? 0) - 1;
  return tokens > 0 && seconds > 0 ? tokens / seconds : undefined;
}

/* A line of what people ask first; unfolded: the stages, tokens and images. */
function drawTimes(turn) {
  const {times, usage, sources = []} = turn, rate = speed(turn);
  const summary = element("summary"), bar = element("div", "bar"), items = element("div", "items");
  const item = (into, ...parts) => into.append(element("span", "item", ...parts), " ");
  const named = (into, label, value, ...key) => item(into, ...key, label + " ", element("b", "", value));
  if (rate) item(summary, element("b", "", rate < 10 ? rate.toFixed(1) : rate.toFixed(0)), " tokens/s");
  if (times.first_token !== undefined) named(summary, "first token", milliseconds(times.first_token));
  if (times.total !== undefined) named(summary, "total", milliseconds(times.total));
  for (const stage of STAGES) {
    const value = times[stage];
    if (value === undefined) continue;
    const part = element("span", stage);
    part.style.flexGrow = String(Math.max(value, .01));
    bar.append(part);
    named(items, stage, milliseconds(value), element("span", "key " + stage));
  }
  if (usage?.total_tokens !== undefined) named(items, "tokens", usage.prompt_tokens + " → " + usage.completion_tokens);
  for (const clip of usage?.prompt_tokens_details?.videos ?? []) {
    named(items, "video", `${clip.frames} frames, ${clip.tokens} tokens`);
  }
  sources.forEach((image, index) => {
    named(items, (usage?.prompt_tokens_details?.videos ? "unit " : "image ") + (index + 1), (SOURCES[image.encode_source] ?? "cached in decoder") + ", " + image.num_tokens + " tokens");
  });
  return bar.childElementCount ? [summary, bar, items] : [summary, items];
}

/* Shows these views, and the welcome if there are none. */
export function showTurns(views) {
  $("turns").replaceChildren(...views.flatMap(view => [view.question, view.answer]));
  $("welcome").hidden = views.length > 0;
}
