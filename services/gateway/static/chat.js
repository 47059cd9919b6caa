/* The chat page: one conversation, asked of the server that serves the page. */
import {seenOf, videoPart} from "./clips.js";
import {$, button, element, icon, say} from "./dom.js";
import {explain, LostAnswer, ServerError} from "./errors.js";
import * as history from "./history.js";
import {HistoryPanel} from "./history_panel.js";
import {notice, readImages, startViewer, thumbnails} from "./images.js";
import {apiKey, openSettings, requestFields, showThinking, startSettings, systemPrompt} from "./settings.js";
import {showTurns, TurnView} from "./turns.js";
import {firstQuestions} from "./welcome.js";

const RETRY_MS = 3000, TICK_MS = 1000;

let model = "", needsKey = false, takesImages = false, takesVideos = false, running = null, attached = [];
let conversation = newConversation(), views = [];
let editing = null;   // {turn, draft}: the question that the next one replaces, and what was being written before

/* The server */
async function call(path, options = {}) {
  const headers = {"content-type": "application/json", ...(apiKey() ? {authorization: "Bearer " + apiKey()} : {})};
  const response = await fetch(path, {...options, headers});
  if (!response.ok) {
    let found = {};
    try { found = (await response.json()).error; } catch { /* not our server's own error */ }
    throw new ServerError(response.status, found, {
      wait: response.headers.get("retry-after"), requestId: response.headers.get("x-request-id"),
    });
  }
  return response;
}

/* Reads the served model; returns whether the server has answered. */
async function connect() {
  try {
    const found = (await (await call("v1/models")).json()).data[0];
    model = found.id;
    takesImages = found.input_modalities.includes("image");
    takesVideos = found.input_modalities.includes("video");
    const room = found.max_model_len ? ` · context ${found.max_model_len.toLocaleString("en")} tokens` : "";
    $("model").replaceChildren(model, element("span", "room", room));
    $("model").title = model + room;
    needsKey = false;
    showThinking(found.can_switch_thinking);
    showModalities();
    return true;
  } catch (error) {
    needsKey = error instanceof ServerError && error.status === 401;
    $("model").textContent = needsKey ? "needs an API key" : explain(error, () => {}).what;
    if (needsKey) openSettings(true);   // a key that is given there connects again
    else setTimeout(connect, RETRY_MS);
    return false;
  }
}

function showModalities() {
  document.body.classList.toggle("takes-images", takesImages);
  $("file").accept = takesVideos ? "image/*,video/*" : "image/*";
  $("title").textContent = takesImages ? "Ask about images" : "Ask a question";
  $("welcome-text").textContent = takesImages ? `Drop, paste or attach images${takesVideos ? " or a clip" : ""}, then ask.` : "";
  $("hint").textContent = "Enter sends · Shift+Enter: new line · Esc stops" + (takesImages ? " · paste or drop images anywhere" : "");
  $("examples").replaceChildren(...firstQuestions(
    {model, takesImages, takesVideos}, {write, choose: () => $("file").click(), attach: file => attach([file])}));
}

/* The question box */
function write(text) {
  $("text").value = text;
  grow();
  $("text").focus();
}

function grow() {
  const box = $("text");
  box.style.height = "auto";
  box.style.height = box.scrollHeight + 2 + "px";
}

async function attach(files) {
  const {images, refused} = await readImages(files, {takesImages, takesVideos});
  for (const image of images) {
    const why = image.isClip ? await look(image) : "";
    if (why) refused.push(`“${image.name}” was not added: ${why}`);
    else attached.push(image);
  }
  notice(refused);
  showAttached();
  $("text").focus();
}

/* Asks what the model would see of a clip; a sentence, if the server refuses it. */
async function look(clip) {
  say("The clip is read.");
  try {
    clip.seen = await seenOf(clip.url, model, call);
  } catch (error) {
    if (error instanceof ServerError && [400, 413, 422].includes(error.status)) {
      return error.message.replace(/^messages\[0\]\.content\[0\][\w.]*: /, "") + ".";
    }
  }
  return "";
}

function showAttached() {
  $("attached").replaceChildren(...thumbnails(attached).map((small, index) => {
    const remove = button("remove", "Remove " + attached[index].name, () => {
      attached.splice(index, 1);
      showAttached();
      $("text").focus();
    }, icon("close"));
    return element("figure", "", small, remove);
  }));
}

function beginEdit(turn) {
  if (running) return;
  endEdit();
  editing = {turn, draft: {text: $("text").value, images: attached}};
  attached = turn.images.filter(image => image.url);
  showAttached();
  $("editing").hidden = false;
  const first = conversation.turns.indexOf(turn);
  views.slice(first).forEach(view => [view.question, view.answer].forEach(shown => shown.classList.add("replaced")));
  write(turn.text);
}

/* Leaves the editing; what was being written before comes back. */
function endEdit() {
  if (!editing) return;
  const {draft} = editing;
  editing = null;
  attached = draft.images;
  showAttached();
  $("editing").hidden = true;
  document.querySelectorAll(".replaced").forEach(shown => shown.classList.remove("replaced"));
  write(draft.text);
}

/* Questions */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

function contentOf({text, images}) {
  const content = images.map(({url, name, isClip}) => {
    if (!url) return {type: "text", text: `(The ${isClip ? "clip" : "image"} “${name}” is not here any more.)`};
    return isClip ? videoPart(url) : {type: "image_url", image_url: {url}};
  });
  return text ? [...content, {type: "text", text}] : content;
}

/* The messages of a request for the answer of `turn`, and of which turn each is. */
function messagesFor(turn) {
  const messages = [], turns = [];
  const add = (of, message) => { turns.push(of); messages.push(message); };
  if (systemPrompt()) add(null, {role: "system", content: systemPrompt()});
  for (const each of conversation.turns) {
    if (each !== turn && !each.answer) continue;
    add(each, {role: "user", content: contentOf(each)});
    if (each === turn) break;
    const {answer, reasoning} = each;
    add(each, {role: "assistant", content: answer, ...(reasoning ? {reasoning_content: reasoning} : {})});
  }
  return {messages, imageAt: (message, part) => turns[message]?.images[part]?.name};
}

/* Reads the answer's events into `turn`; `onChange` is called after each. */
async function read(response, turn, onChange) {
  for await (const event of events(response)) {
    if (event === "[DONE]") { turn.isDone = true; return; }
    const chunk = JSON.parse(event), choice = chunk.choices?.[0];
    if (chunk.error) throw new ServerError(500, chunk.error, {requestId: response.headers.get("x-request-id")});
    turn.reasoning += choice?.delta?.reasoning_content ?? "";
    turn.answer += choice?.delta?.content ?? "";
    if (turn.reasoning) turn.thinkingSince ||= Date.now();
    if (turn.reasoning && turn.answer) turn.thoughtMs ||= Date.now() - turn.thinkingSince;
    if (choice?.finish_reason === "length") turn.cut = true;
    if (chunk.stage_times_ms) Object.assign(turn, {times: chunk.stage_times_ms, usage: chunk.usage, sources: chunk.images});
    onChange();
  }
  throw new LostAnswer();
}

/* Not on a phone, where it would raise the keyboard. */
function focusText() {
  if (!matchMedia("(pointer: coarse)").matches) $("text").focus({preventScroll: true});
}

const EMPTY = {answer: "", reasoning: "", thinkingSince: 0, thoughtMs: 0, cut: false, stopped: false, isDone: false, error: null, times: null, usage: null, sources: []};

/* Asks for the answer of the last turn, again if it has one: that comes back if nothing else does. */
async function answer(turn) {
  if (running) return;
  const of = conversation, view = views[of.turns.indexOf(turn)], before = {...turn};
  const {messages, imageAt} = messagesFor(turn);
  let drawing = 0, response = null;
  const onChange = () => {   // once a frame, however fast tokens come
    drawing ||= requestAnimationFrame(() => { drawing = 0; view.draw(true); });
  };
  const own = running = new AbortController(), ticking = setInterval(onChange, TICK_MS);   // for the time of thinking
  Object.assign(turn, EMPTY);
  showRunning();
  view.draw(true);
  scrollDown();
  keep(of);
  say("Answering");
  try {
    response = await call("v1/chat/completions", {
      method: "POST", signal: own.signal,
      body: JSON.stringify({model, messages, stream: true, stream_options: {include_usage: true}, include_stage_times: true, ...requestFields()}),
    });
    await read(response, turn, onChange);
  } catch (error) {
    const isStop = error.name === "AbortError", isLost = response && !(error instanceof ServerError);
    const found = isStop ? null : {...explain(isLost ? new LostAnswer() : error, imageAt), needsKey: error.status === 401};
    if (!turn.answer && before.answer) Object.assign(turn, before, {error: found});
    else Object.assign(turn, {stopped: isStop, error: found});
  } finally {
    clearInterval(ticking);
    cancelAnimationFrame(drawing);
    running = null;
    showRunning();
    document.querySelectorAll("details.times[open]").forEach(shown => { shown.open = false; });
    view.times.open = true;
    view.draw();
    if (of.turns.includes(turn)) keep(of);
    if (of === conversation) {
      focusText();
      say(turn.error ? "" : turn.answer.slice(0, 500));
      if (turn.error) view.error.scrollIntoView({block: "nearest"});
    }
  }
}

function showRunning() {
  document.body.classList.toggle("busy", !!running);
  $("send").textContent = running ? "Stop" : "Send";
}

function send() {
  const text = $("text").value.trim(), images = attached;
  if (!text && !images.length) return;
  if (!model && needsKey) { openSettings(true); return; }
  if (!model) { notice(["The question was not sent: the page has no connection to the server yet. It tries again every few seconds."]); return; }
  notice([]);
  write("");
  attached = [];
  if (editing) {
    conversation.turns.length = conversation.turns.indexOf(editing.turn);
    endEdit();
  }
  showAttached();
  const turn = {text, images, ...EMPTY};
  conversation.turns.push(turn);
  showConversation();
  answer(turn);
}

/* Conversations */
function newConversation() {
  return {id: history.newId(), turns: []};
}

function showConversation() {
  const known = new Map(views.map(view => [view.turn, view]));
  views = conversation.turns.map(turn => known.get(turn) ?? new TurnView(turn, {
    onEdit: () => beginEdit(turn), onAgain: () => answer(turn), onSettings: () => openSettings(true),
  }));
  showTurns(views);
  views.forEach(view => { if (!known.has(view.turn)) view.draw(); });
  scrollDown();
}

function change(to) {
  running?.abort();
  endEdit();
  conversation = to;
  remember(to.turns.length ? to.id : "");
  notice([]);
  showConversation();
  focusText();
}

/* The conversation that a reload of this tab shows. */
const remember = id => sessionStorage.setItem("conversation", id);

async function keep(of) {
  if (of.isForgotten) return;
  try {
    if (of === conversation) remember(of.id);
    if (!await history.keep(of)) notice(["The images of this conversation are not kept after you leave it: this browser's storage is full."]);
  } catch {
    $("history-note").textContent = "This browser keeps nothing: it has no storage for this page (a private window?).";
  }
}

function forgetCurrent() {
  conversation.isForgotten = true;   // what still runs is not kept
  change(newConversation());
}

new HistoryPanel({
  conversation: () => conversation,
  open: async id => { if (id !== conversation.id) change(await history.load(id) ?? newConversation()); },
  rename: (id, title) => { if (id === conversation.id) conversation.title = title; },
  forget: id => { if (!id || id === conversation.id) forgetCurrent(); },
});

/* Scrolling: who reads the end keeps seeing it, whatever grows. */
const box = $("scroll");
let isAtEnd = true, lastTop = 0;
const scrollDown = () => { isAtEnd = true; box.scrollTop = box.scrollHeight; };
box.onscroll = () => {   // only a person scrolls up; what grows in the meantime does not
  const isNearEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  isAtEnd = isNearEnd || (isAtEnd && box.scrollTop >= lastTop);
  lastTop = box.scrollTop;
};
const sizes = new ResizeObserver(() => { if (isAtEnd) box.scrollTop = box.scrollHeight; });
sizes.observe(box);
sizes.observe($("turns"));

/* Input */
$("form").onsubmit = event => {
  event.preventDefault();
  if (running) running.abort();
  else send();
};
$("text").oninput = grow;
$("text").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
};
for (const [opener, input] of [["attach", "file"], ["camera", "photo"]]) {
  $(opener).onclick = () => $(input).click();
  $(input).onchange = () => { attach([...$(input).files]); $(input).value = ""; };
}
$("clear").onclick = () => change(newConversation());
$("cancel-edit").onclick = endEdit;
for (const dialog of document.querySelectorAll("dialog.panel")) {
  dialog.querySelector(".close").onclick = () => dialog.close();
  dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });   // beside it
}
document.onkeydown = event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (running) running.abort();
    else endEdit();
  }
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); $("clear").click(); }
};
document.onpaste = event => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); attach(files); }
};
let depth = 0;
const holdsFiles = event => [...event.dataTransfer.types].includes("Files");
const showDropping = () => document.body.classList.toggle("dropping", depth > 0);
document.ondragenter = event => { if (takesImages && holdsFiles(event)) { depth++; showDropping(); } };
document.ondragleave = event => { if (takesImages && holdsFiles(event)) { depth = Math.max(0, depth - 1); showDropping(); } };
document.ondragover = event => { if (holdsFiles(event)) event.preventDefault(); };
document.ondrop = event => {
  if (!holdsFiles(event)) return;
  event.preventDefault();
  depth = 0;
  showDropping();
  attach([...event.dataTransfer.files]);
};

startSettings(connect);
startViewer();
connect();
const open = sessionStorage.getItem("conversation");
if (open) {
  history.load(open).then(found => { if (found && !conversation.turns.length) change(found); }, () => {});
}
