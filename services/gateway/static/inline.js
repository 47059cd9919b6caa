/* Markdown within a block: code, formulas, emphasis and links. The time is linear in the text's length: what looks
   for a closing delimiter stops at the next delimiter of its kind, or remembers for later openings where it is. */
import {element} from "./dom.js";
import {formula} from "./formulas.js";

const SPECIAL = /[`$\\*_~!\[<]|(?<!\w)https?:\/\//gi, TICKS = /`+/y;
const DISPLAYED = /\$\$([^$]+)\$\$/y, ESCAPED = /\\([\\`*_{}\[\]()#+.!|~>$-])/y;
const DOLLARS = /(?<![\w$`])\$((?![\s$])(?:\\[^]|[^$`\\\n])*?(?<![\s\\]))\$(?![\w$])/y;   // prices are no formulas, nor is code whose end has not come yet
const BOLD = /\*\*(?=\S)([^*]+(?:\*[^*]+)*?\*?)\*\*(?!\*)/y, BOTH = /\*\*\*(?=\S)([^*]+)\*\*\*(?!\*)/y, ITALIC = /(?<![\w*])([*_])(?=\S)([^*_\n]+)\1(?!\w)/y;
const STRUCK = /~~([^~\n]+)~~/y, TARGET = /\(([^()\s]*)\)/y;
const BARE = /https?:\/\/[^\s<>"`|\\^{}]+/yi, BRACED = /<(https?:\/\/[^\s<>]+)>/yi;
const MAX_FORMULA = 4000;

/* The match of a sticky expression at a place. */
function matchAt(expression, text, at) {
  expression.lastIndex = at;
  return expression.exec(text);
}

/* Where a delimiter comes next, or -1; asked for places that only grow. */
function finder(text, delimiter) {
  let found = -2;
  return from => {
    if (found !== -1 && found < from) found = text.indexOf(delimiter, from);
    return found;
  };
}

/* As `finder`, for runs of backticks by their length. */
function ticksFinder(text) {
  const places = new Map(), passed = new Map();
  for (const run of text.matchAll(/`+/g)) {
    if (!places.has(run[0].length)) places.set(run[0].length, []);
    places.get(run[0].length).push(run.index);
  }
  return (length, from) => {
    const known = places.get(length) ?? [];
    let next = passed.get(length) ?? 0;
    while (next < known.length && known[next] < from) next++;
    passed.set(length, next);
    return known[next] ?? -1;
  };
}

/* A link to another site, in a tab of its own. */
function linkTo(url, label) {
  const link = element("a", "", label);
  link.href = url;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

/* An address in running text without the punctuation behind it; a closing parenthesis belongs to it if it opened one. */
function withoutPunctuation(url) {
  let end = url.length, closing = url.split(")").length - url.split("(").length;
  while (/[.,:;!?*_~'")\]]/.test(url[end - 1]) && (url[end - 1] !== ")" || closing > 0)) {
    if (url[--end] === ")") closing--;
  }
  return url.slice(0, end);
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.ticks = ticksFinder(text);
    this.bracketed = finder(text, "\\]");
    this.parenthesized = finder(text, "\\)");
    this.label = finder(text, "]");
    this.line = finder(text, "\n");
    this.urls = new Map();
  }

  /* The node at a place, and where it ends; nothing if the character is plain. */
  at(place) {
    switch (this.text[place]) {
      case "`": return this.code(place);
      case "$": return this.dollars(place);
      case "\\": return this.escape(place);
      case "*": return this.marked(BOTH, place, match => element("strong", "", inline(element("em"), match[1])))
        ?? this.marked(BOLD, place, match => inline(element("strong"), match[1])) ?? this.italic(place);
      case "_": return this.italic(place);
      case "~": return this.marked(STRUCK, place, match => element("s", "", match[1]));
      case "!": return this.text[place + 1] === "[" ? this.link(place, place + 1) : undefined;
      case "[": return this.link(place, place);
      case "<": return this.marked(BRACED, place, match => linkTo(match[1], match[1]));
      default: return this.address(place);
    }
  }

  marked(expression, place, made) {
    const match = matchAt(expression, this.text, place);
    return match && [made(match), place + match[0].length];
  }

  italic(place) {
    return this.marked(ITALIC, place, match => inline(element("em"), match[2]));
  }

  /* A run of backticks that no run of its length follows is text. */
  code(place) {
    const [run] = matchAt(TICKS, this.text, place), begin = place + run.length;
    const end = this.ticks(run.length, begin);
    if (end < 0) return [run, begin];
    const inner = this.text.slice(begin, end);
    return [element("code", "", inner.trim() || inner), end + run.length];
  }

  dollars(place) {
    return this.marked(DISPLAYED, place, match => formula(match[1], true))
      ?? this.marked(DOLLARS, place, match => formula(match[1], false));
  }

  escape(place) {
    const next = this.text[place + 1], begin = place + 2;
    if (next === "[" || next === "(") {
      const end = next === "[" ? this.bracketed(begin + 1) : this.parenthesized(begin + 1);
      if (end > 0 && end - begin <= MAX_FORMULA) return [formula(this.text.slice(begin, end), next === "["), end + 2];
    }
    return this.marked(ESCAPED, place, match => match[1]);
  }

  link(place, bracket) {
    const end = this.label(bracket + 1), line = this.line(bracket + 1);
    if (end < 0 || (line >= 0 && line < end)) return undefined;
    if (!this.urls.has(end)) this.urls.set(end, matchAt(TARGET, this.text, end + 1));
    const match = this.urls.get(end);
    if (!match) return undefined;
    const [whole, url] = match, after = end + 1 + whole.length;
    if (!/^(https?:|mailto:)/i.test(url)) return [this.text.slice(place, after), after];
    return [linkTo(url, this.text.slice(bracket + 1, end) || url), after];   // an image, too: it is not loaded
  }

  /* A web address in running text. */
  address(place) {
    const match = matchAt(BARE, this.text, place), url = match && withoutPunctuation(match[0]);
    return url?.split("/")[2] ? [linkTo(url, url), place + url.length] : undefined;
  }
}

/* Draws the text of a block. */
export function inline(into, text) {
  const scanner = new Scanner(text);
  let drawn = 0;
  for (const special of text.matchAll(SPECIAL)) {
    if (special.index < drawn) continue;
    const found = scanner.at(special.index);
    if (!found) continue;
    into.append(text.slice(drawn, special.index), found[0]);
    drawn = found[1];
  }
  into.append(text.slice(drawn));
  return into;
}
