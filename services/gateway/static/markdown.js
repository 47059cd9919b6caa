/* Markdown: elements and text nodes only, so that nothing of an answer is HTML; nothing of it is loaded. */
import {codeBlock} from "./code.js";
import {element} from "./dom.js";
import {inline} from "./inline.js";

/* No two neighbours of an expression match the same characters: else a line would take the square of its length. */
const FENCE = /^ *(`{3,}|~{3,}) *([\w+#.-]*)$/, HEADING = /^ {0,3}(#{1,6}) +([^]*)$/, RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/, ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)])(?: +|$)([^]*)$/, DASHES = /^\|?(?: *:?-+:? *\|)+(?: *:?-+:?)?$/;
const FORMULA = /^ *(\$\$|\\\[)/, FORMULA_END = {"$$": "$$", "\\[": "\\]"};
const TASK = /^\[([ xX])\] +/;
const MAX_DEPTH = 8, MAX_LEVEL = 6;

const cells = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim());
const fenceOf = line => FENCE.exec(line.trimEnd());
const begins = (lines, i) => fenceOf(lines[i]) || HEADING.test(lines[i]) || RULE.test(lines[i]) || QUOTE.test(lines[i])
  || FORMULA.test(lines[i]) || ITEM.test(lines[i]) || (lines[i].includes("|") && DASHES.test((lines[i + 1] ?? "").trim()));

/* A heading, without the number signs that may close it; the page's own title is the only one of the first level. */
function heading(line) {
  const [, signs, text] = HEADING.exec(line);
  let end = text.length;
  while (text[end - 1] === "#") end--;
  const isClosed = end < text.length && text[end - 1] === " ";
  return inline(element("h" + Math.min(signs.length + 1, MAX_LEVEL)), isClosed ? text.slice(0, end).trimEnd() : text);
}

/* Where the block that begins at line `i` ends. */
function endOf(lines, i, depth) {
  const line = lines[i], start = i;
  if (depth >= MAX_DEPTH || !begins(lines, i)) {
    do i++; while (i < lines.length && lines[i].trim() && (depth >= MAX_DEPTH || !begins(lines, i)));
  } else if (fenceOf(line)) {
    const fence = fenceOf(line)[1];
    do i++; while (i < lines.length && !fenceOf(lines[i])?.[1].startsWith(fence));
    i++;
  } else if (FORMULA.test(line)) {
    const [opening, delimiter] = FORMULA.exec(line), end = FORMULA_END[delimiter];
    while (lines[i]?.trim() && !(i > start ? lines[i] : line.slice(opening.length)).includes(end)) i++;
    i++;
  } else if (QUOTE.test(line)) while (i < lines.length && QUOTE.test(lines[i])) i++;
  else if (HEADING.test(line) || RULE.test(line)) i++;
  else if (ITEM.test(line)) {
    const [, indent, number] = ITEM.exec(line), belongs = l => l.trim() && l.length - l.trimStart().length > indent.length;
    for (let item; i < lines.length && (item = ITEM.exec(lines[i])) && item[1].length <= indent.length && (item[2] === undefined) === (number === undefined);) {
      while (++i < lines.length && (belongs(lines[i]) || (!lines[i].trim() && belongs(lines[i + 1] ?? ""))));
      if (!lines[i]?.trim() && ITEM.test(lines[i + 1] ?? "")) i++;   // a blank line between items
    }
  } else for (i += 2; i < lines.length && lines[i].includes("|");) i++;
  return i;
}

function list(lines, depth) {
  const [, indent, number] = ITEM.exec(lines[0]), made = element(number === undefined ? "ul" : "ol");
  if (number !== undefined) made.start = Number(number);
  for (let i = 0; i < lines.length;) {
    const inner = [ITEM.exec(lines[i])[3]];
    while (++i < lines.length && !(ITEM.test(lines[i]) && ITEM.exec(lines[i])[1].length <= indent.length)) inner.push(lines[i]);
    const margin = inner.slice(1).filter(l => l.trim()).reduce((least, l) => Math.min(least, l.length - l.trimStart().length), Infinity);
    const task = TASK.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    const item = markdown(element("li"), inner.map((l, n) => n ? l.slice(margin) : l).join("\n"), depth + 1);
    if (task) addBox(item, task[1] !== " ");
    made.append(item);
  }
  return made;
}

/* The box of a task, which shows its state and cannot be changed. */
function addBox(item, isDone) {
  const box = element("input");
  Object.assign(box, {type: "checkbox", disabled: true, checked: isDone, ariaLabel: isDone ? "Done" : "To do"});
  item.className = "task";
  (item.querySelector(":scope > p:first-child") ?? item).prepend(box);
}

/* How the dashes of a table's second line align a column; "" is as usual. */
const alignment = ([first, ...rest]) => rest.at(-1) === ":" ? (first === ":" ? "center" : "right") : "";

function table(lines) {
  const made = element("table"), width = cells(lines[0]).length, columns = cells(lines[1]).map(alignment);
  lines.forEach((line, number) => {
    if (number === 1) return;
    const row = element("tr");
    cells(line).slice(0, width).forEach((text, column) => {
      const cell = inline(element(number ? "td" : "th"), text);
      if (columns[column]) cell.style.textAlign = columns[column];
      row.append(cell);
    });
    made.append(row);
  });
  const box = element("div", "table scrolls", made);
  box.tabIndex = 0;   // scrolls with the keyboard
  return box;
}

function block(lines, depth) {
  const [line] = lines, text = lines.join("\n");
  if (depth >= MAX_DEPTH || !begins(lines, 0)) return inline(element("p"), text);
  if (fenceOf(line)) {
    const [, fence, language] = fenceOf(line);
    const isClosed = lines.length > 1 && fenceOf(lines.at(-1))?.[1].startsWith(fence);
    return codeBlock(language, lines.slice(1, isClosed ? -1 : undefined).join("\n"));
  }
  if (HEADING.test(line)) return heading(line);
  if (RULE.test(line)) return element("hr");
  if (QUOTE.test(line)) return markdown(element("blockquote"), lines.map(l => l.replace(QUOTE, "")).join("\n"), depth + 1);
  if (ITEM.test(line)) return list(lines, depth);
  if (FORMULA.test(line)) return inline(element("p"), text.trim());
  return table(lines);
}

/* Draws `text`; blocks that `into` shows already stay as they are. */
export function markdown(into, text, depth = 0) {
  const lines = text.split("\n"), blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i++; continue; }
    const end = endOf(lines, i, depth);
    blocks.push(lines.slice(i, end));
    i = end;
  }
  const shown = [...into.children];
  let same = 0;
  while (same < blocks.length && shown[same]?.source === blocks[same].join("\n")) same++;
  for (const old of shown.slice(same)) old.remove();
  for (const each of blocks.slice(same)) {
    const made = block(each, depth);
    made.source = each.join("\n");
    into.append(made);
  }
  return into;
}
