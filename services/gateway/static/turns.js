/* One question and its answer, as they are drawn. A turn is data: {text, images, answer, reasoning, thinkingSince,
   thoughtMs, cut, stopped, isDone, error, times, usage, sources}; drawing it again shows what has changed. */
import {$, button, copyButton, element, icon} from "./dom.js";
import {thumbnails} from "./images.js";
import {markdown} from "./markdown.js";

const STAGES = {
  fetch: "Images are fetched, and their sizes are read",
  encode: "The longest call to an encoder",
  transfer: "The decoder waits for the images' embeddings",
  queue: "The decoder waits for its turn, and for an image at the beginning of the prompt",
  prefill: "The decoder reads the prompt",
};
const MAX_LINE = 300;
const SOURCES = {computed: "encoded", memory: "cached", redis: "cached (Redis)", joined: "shared"};

export class TurnView {
  /* `onEdit`, `onAgain`, `onSettings`: what the buttons do. */
  constructor(turn, {onEdit, onAgain, onSettings}) {
    this.turn = turn;
    this.question = element("li", "turn user");
    if (turn.images.length) this.question.append(element("div", "images", ...thumbnails(turn.images)));
    const edit = element("div", "actions", button("quiet edit", "Edit question", onEdit, icon("edit")));
    this.question.append(element("div", "asked", edit, ...(turn.text ? [element("div", "bubble", turn.text)] : [])));

    this.reasoning = element("details", "reasoning", element("summary"), element("div"));
    this.thought = element("p", "thought");   // the last line of a reasoning that goes on
    this.bubble = element("div", "bubble markdown");
    this.note = element("p", "note");
    this.times = element("details", "times");
    const again = button("quiet again", "Regenerate answer", onAgain, icon("again"));
    this.actions = element("div", "actions", copyButton("Copy answer", () => turn.answer), again);
    this.error = element("div", "error");
    this.error.setAttribute("role", "alert");
    this.buttons = {again: onAgain, edit: onEdit, settings: onSettings};
    this.answer = element("li", "turn assistant", this.reasoning, this.thought, this.bubble, this.note, this.error,
      element("div", "below", this.actions, this.times));
  }

  /* Draws what the turn is now; `isRunning`: more is to come. */
  draw(isRunning = false) {
    const {turn} = this;
    this.answer.setAttribute("aria-busy", String(isRunning));
    this._drawReasoning(isRunning && !turn.answer);
    markdown(this.bubble, turn.answer);
    this.bubble.hidden = !turn.answer && (!isRunning || !!turn.reasoning);
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

  /* `goesOn`: the reasoning is not at its end. */
  _drawReasoning(goesOn) {
    const {reasoning, thinkingSince, thoughtMs} = this.turn, [summary, shown] = this.reasoning.children;
    this.reasoning.hidden = !reasoning;
    this.thought.hidden = !reasoning || !goesOn || this.reasoning.open;
    if (!reasoning) return;
    summary.textContent = goesOn ? `Thinking… ${Math.floor((Date.now() - thinkingSince) / 1000)} s`
      : thoughtMs ? `Thought for ${milliseconds(thoughtMs)}` : "Reasoning";
    if (shown.textContent.length !== reasoning.length) shown.textContent = reasoning;
    const end = reasoning.slice(-MAX_LINE).trimEnd();
    this.thought.textContent = end.slice(end.lastIndexOf("\n") + 1);
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
      element("div", "buttons", ...(error.needsKey ? [act("Enter a key", settings)] : []),
        ...(error.isFinal ? [] : [act("Try again", again)]), act("Edit question", edit)));
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

const item = (into, ...parts) => into.append(element("span", "item", ...parts), " ");
const named = (into, label, value) => item(into, label + " ", element("b", "", value));

/* When each stage began and ended, in milliseconds since the request came. The call to the encoder and the wait in the
   decoder begin together, once the images are fetched; the decoder's own stages end with the first token. */
function spans(times) {
  const end = times.first_token, begin = Math.max(0, end - (times.queue ?? 0) - (times.prefill ?? 0));
  const lasting = name => [begin, begin + times[name]];
  const found = {
    fetch: [begin - times.fetch, begin], encode: lasting("encode"), transfer: lasting("transfer"),
    queue: lasting("queue"), prefill: [end - times.prefill, end],
  };
  return Object.keys(STAGES).filter(name => times[name] !== undefined)
    .map(name => [name, ...found[name].map(at => Math.min(Math.max(at, 0), end))]);
}

/* A row for each stage until the first token, with a bar from its begin to its end. */
function timeline(times) {
  const rows = element("div", "timeline");
  for (const [name, begin, end] of times.first_token ? spans(times) : []) {
    const bar = element("span", "bar " + name), label = element("span", "", name), of = times.first_token / 100;
    bar.style.marginLeft = begin / of + "%";
    bar.style.width = (end - begin) / of + "%";
    label.title = STAGES[name];
    rows.append(label, element("span", "track", bar), element("b", "", milliseconds(times[name])));
  }
  return rows;
}

/* How many images and pieces of clips were encoded for this answer: one by one, or in all if there are clips. */
function drawSources(items, sources, videos) {
  if (!videos.length) {
    sources.forEach((image, index) => named(
      items, "image " + (index + 1), `${SOURCES[image.encode_source] ?? "cached in decoder"}, ${image.num_tokens} tokens`));
    return;
  }
  for (const clip of videos) named(items, "video", `${clip.frames} frames, ${clip.tokens} tokens`);
  const encoded = sources.filter(each => each.encode_source === "computed").length;
  item(items, element("b", "", `${encoded} of ${sources.length}`), " pieces new");
}

/* A line of what people ask first; unfolded: the stages, tokens and images. */
function drawTimes(turn) {
  const {times, usage, sources = []} = turn, rate = speed(turn);
  const summary = element("summary"), items = element("div", "items"), stages = timeline(times);
  if (rate) item(summary, element("b", "", rate < 10 ? rate.toFixed(1) : rate.toFixed(0)), " tokens/s");
  if (times.first_token !== undefined) named(summary, "first token", milliseconds(times.first_token));
  if (times.total !== undefined) named(summary, "total", milliseconds(times.total));
  if (usage?.total_tokens !== undefined) named(items, "tokens", usage.prompt_tokens + " → " + usage.completion_tokens);
  drawSources(items, sources, usage?.prompt_tokens_details?.videos ?? []);
  return stages.childElementCount ? [summary, stages, items] : [summary, items];
}

/* Shows these views, and the welcome if there are none. */
export function showTurns(views) {
  $("turns").replaceChildren(...views.flatMap(view => [view.question, view.answer]));
  $("welcome").hidden = views.length > 0;
}
