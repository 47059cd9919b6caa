/* Blocks of code: a language, a copy button, and colours for comments, strings, numbers and keywords.
   It knows no grammar: what a language writes like none of these families stays plain. */
import {copyButton, element} from "./dom.js";

const C_COMMENTS = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`, HASH = String.raw`(?<![^\s;])#[^\n]*`;
const DOUBLE = String.raw`"(?:\\[^]|[^"\\\n])*"`, SINGLE = String.raw`'(?:\\[^]|[^'\\\n])*'`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`, TICKS = "`(?:\\\\[^]?|[^`\\\\])*(?:`|$)";
const ESCAPED = String.raw`\\[^]`;   // of no string: its quote begins none, or each would be read to the end of its line
const KEYWORDS = `abstract and as assert async await begin bool boolean break case catch char class const continue
 def default defer del delete do double elif else end enum except export extends extern false False final finally
 float fn for foreach from func function global go if impl implements import in instanceof int interface is lambda
 let local long loop match mod module mut namespace new nil none None nonlocal not null of operator or package pass
 private protected pub public raise range return self short sizeof static string struct super switch template then
 this throw trait true True try type typedef typeof union unsafe unsigned use using var virtual void volatile when
 where while with yield done esac fi echo SELECT FROM WHERE JOIN LEFT RIGHT INNER ON GROUP ORDER BY HAVING INSERT
 INTO VALUES UPDATE SET DELETE CREATE TABLE DROP ALTER INDEX AND OR NOT NULL AS LIMIT DISTINCT UNION`;
const WORDS = String.raw`(?<![\w.$-])(?:${KEYWORDS.trim().split(/\s+/).join("|")})(?![\w$-])`;
const NUMBER = String.raw`(?<![\w.])\d[\w.]*`;
const FAMILIES = [   // languages, comments, strings; keywords and numbers where they are others
  ["py python pyi rb ruby r perl", HASH, `${TRIPLE}|${DOUBLE}|${SINGLE}`],
  ["sh bash zsh shell console yaml yml toml dockerfile makefile ini", HASH, `${DOUBLE}|'[^']*'`, WORDS, "(?!)"],   // numbers are parts of names and addresses
  ["js javascript jsx mjs ts typescript tsx go", C_COMMENTS, `${TICKS}|${DOUBLE}|${SINGLE}`],
  ["c h cc cpp c++ cu cuda cs csharp c# java kotlin swift scala dart php css scss proto protobuf json jsonc", C_COMMENTS, `${DOUBLE}|${SINGLE}`],
  ["rs rust", C_COMMENTS, String.raw`${DOUBLE}|'(?:\\[^']+|[^'\\\n])'`],
  ["sql lua hs haskell", String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`, `${DOUBLE}|${SINGLE}`],
  ["html xml svg vue", "<!--[^]*?(?:-->|$)", `${DOUBLE}|${SINGLE}`, String.raw`(?<=<\/?)[\w:-]+`],
];
const PATTERNS = new Map();
for (const [names, comments, strings, words = WORDS, numbers = NUMBER] of FAMILIES) {
  const pattern = new RegExp(`(?<comment>${comments})|(?<string>${strings})|(?<number>${numbers})|(?<keyword>${words})|${ESCAPED}`, "g");
  for (const name of names.split(" ")) PATTERNS.set(name, pattern);
}

export function codeBlock(language, text) {
  const code = element("code");
  const pattern = PATTERNS.get(language.toLowerCase());
  let at = 0;
  for (const found of pattern ? text.matchAll(pattern) : []) {
    const kind = Object.keys(found.groups).find(name => found.groups[name] !== undefined);
    if (!kind) continue;
    code.append(text.slice(at, found.index), element("span", kind, found[0]));
    at = found.index + found[0].length;
  }
  code.append(text.slice(at));
  const box = element("pre", "scrolls", code);
  box.tabIndex = 0;   // scrolls with the keyboard
  const head = element("div", "code-head", element("span", "", language), copyButton("Copy code", () => text));
  return element("div", "code", head, box);
}
