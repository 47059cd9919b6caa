/* Formulas as MathML. Temml is loaded with the first one; until then, and without it, the source shows. */
import {element} from "./dom.js";

let library;
function load() {
  return library ??= new Promise((resolve, reject) => {
    const script = element("script");
    script.src = new URL("temml.min.js", import.meta.url).href;
    script.onload = () => resolve(window.temml);
    script.onerror = reject;
    document.head.append(script);
  });
}

export function formula(tex, isDisplayed) {
  const box = element("span", isDisplayed ? "formula displayed scrolls" : "formula", tex);
  const options = {displayMode: isDisplayed, throwOnError: false, trust: false, maxExpand: 200, maxSize: [20, 200]};
  load().then(temml => {
    temml.render(tex, box, options);
    if (box.scrollWidth > box.clientWidth && isDisplayed) box.tabIndex = 0;   // scrolls with the keyboard
  }).catch(() => {
    box.textContent = tex;
    box.classList.add("source");
  });
  return box;
}
