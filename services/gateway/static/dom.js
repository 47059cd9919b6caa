/* Elements, icons of index.html, and the clipboard. */
export const $ = id => document.getElementById(id);

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", "#icon-" + name);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

export function button(className, label, onclick, shown = label) {
  const made = element("button", className, shown);
  made.type = "button";
  made.title = label;
  made.setAttribute("aria-label", label);
  made.onclick = onclick;
  return made;
}

/* Keeps the classes `more-left` and `more-right` on a box that scrolls sideways: more is hidden at that side. */
export function markScroll(box) {
  const mark = () => {
    const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", rest > 1);
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;   // scrolls with the keyboard
    else box.removeAttribute("tabindex");
  };
  box.addEventListener("scroll", mark, {passive: true});
  new ResizeObserver(mark).observe(box);
  new MutationObserver(mark).observe(box, {childList: true});
}

/* A button that copies `text()` and says so. */
export function copyButton(label, text) {
  const made = button("quiet copy", label, async () => {
    const copied = await copy(text());
    say(copied ? "Copied" : "The browser does not allow copying.");
    made.classList.toggle("copied", copied);
    made.replaceChildren(icon(copied ? "done" : "copy"));
    setTimeout(() => made.replaceChildren(icon("copy")), 1500);
  }, icon("copy"));
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {   // no such thing on a page without TLS that is not on this machine
    const box = element("textarea", "visually-hidden");
    const before = document.activeElement;
    box.value = text;
    document.body.append(box);
    box.select();
    const copied = document.execCommand("copy");
    box.remove();
    before?.focus();
    return copied;
  }
}

/* Says something to those who hear the page. */
let silence;
export function say(text) {
  $("status").textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => { $("status").textContent = ""; }, 3000);
}
