/* The history dialog: conversations that this browser keeps are found, opened, renamed, saved as a file and deleted. */
import {$, button, element, icon, say} from "./dom.js";
import * as history from "./history.js";

export function titleOf({title, turns}) {
  return title || turns[0]?.text || turns[0]?.images[0]?.name || "Empty";
}

/* A conversation as Markdown: a heading for each question, with the names of its images. */
function asMarkdown(record) {
  const parts = record.turns.map(({text, images, answer}) => [
    "## " + (text.replace(/\s+/g, " ") || "(no text)"), ...images.map(({name}) => `*${name}*`), answer || "*no answer*",
  ].join("\n\n"));
  return [`# ${titleOf(record).replace(/\s+/g, " ")}`, ...parts].join("\n\n") + "\n";
}

function save(record) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([asMarkdown(record)], {type: "text/markdown"}));
  link.download = (titleOf(record).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-|-$/g, "") || "conversation") + ".md";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  say("Saved as " + link.download);
}

/* Whether each word of a search is in a conversation's title, questions or answers. */
function matches(record, words) {
  const text = [titleOf(record), ...record.turns.flatMap(turn => [turn.text, turn.answer])].join("\n").toLowerCase();
  return words.every(word => text.includes(word));
}

export class HistoryPanel {
  /* `conversation()` is the one that the page shows, `open(id)` shows another, `rename(id, title)` and `forget(id)` tell
     the page of a change; without an id all are forgotten. */
  constructor({conversation, open, rename, forget}) {
    Object.assign(this, {conversation, open, onRename: rename, onForget: forget});
    this.records = [];
    $("open-history").onclick = async () => { $("search").value = ""; await this.show(); $("history").showModal(); };
    $("history").onclose = () => this._ask(false);
    $("search").oninput = () => this._draw();
    $("delete-all").onclick = () => this._deleteAll();
  }

  async show() {
    this.records = await history.kept().catch(() => []);
    const isEmpty = !this.records.length;
    $("delete-all").hidden = $("search").hidden = isEmpty;
    this._draw();
  }

  _draw() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.records.filter(record => matches(record, words));
    $("no-history").hidden = found.length > 0;
    $("no-history").textContent = this.records.length ? "No conversation has these words." : "Your conversations will be listed here.";
    $("kept").replaceChildren(...found.map(record => this._row(record)));
  }

  _row(record) {
    const title = titleOf(record), when = new Date(record.changed);
    const day = element("span", "day", when.toLocaleString([], {dateStyle: "medium", timeStyle: "short"}));
    const row = element("button", "row", element("span", "name", title), day);   // named by what it shows
    row.type = "button";
    row.title = title;
    row.onclick = () => {
      $("history").close();
      this.open(record.id);
    };
    if (record.id === this.conversation().id) row.setAttribute("aria-current", "true");
    const item = element("li", "", row);
    item.append(
      button("quiet rename", `Rename “${title}”`, () => this._rename(record, item), icon("edit")),
      button("quiet save", `Save “${title}” as a file`, () => save(record), icon("save")),
      button("quiet delete", `Delete “${title}”`, () => this._delete(record.id), icon("delete")));
    return item;
  }

  /* A field in the row's place: Enter keeps what it says, Escape or leaving it does not. */
  _rename(record, item) {
    const field = element("input", "title");
    field.value = titleOf(record);
    field.setAttribute("aria-label", "New title");
    field.onkeydown = async event => {
      if (event.key === "Escape") { event.preventDefault(); event.stopPropagation(); this._draw(); }
      if (event.key !== "Enter" || event.isComposing) return;
      field.onblur = null;
      const title = field.value.trim();
      await history.rename(record.id, title);
      this.onRename(record.id, title);
      await this.show();
    };
    field.onblur = () => this._draw();
    item.replaceChildren(field);
    field.focus();
    field.select();
  }

  async _delete(id) {
    this.onForget(id);
    await history.forget(id);
    await this.show();
  }

  /* The first click asks, the second deletes. */
  async _deleteAll() {
    if (!$("delete-all").classList.contains("sure")) { this._ask(true); return; }
    this._ask(false);
    this.onForget();
    await history.forgetAll();
    await this.show();
  }

  _ask(isAsking) {
    $("delete-all").classList.toggle("sure", isAsking);
    $("delete-all").textContent = isAsking ? "Really delete all?" : "Delete all";
  }
}
