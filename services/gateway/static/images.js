/* Images and clips: taken from files, shown small; images are enlarged. What is refused is named in the notice above
   the question. */
import {strip} from "./clips.js";
import {$, button, element, icon} from "./dom.js";
import {newId} from "./history.js";

const SENT_AS_THEY_ARE = ["image/jpeg", "image/png", "image/webp", "image/gif"], MAX_FILE_BYTES = 8e6, MAX_SIDE = 4096;
const MAX_CLIP_BYTES = 40e6;

const readUrl = blob => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

async function imageUrl(file) {
  const bitmap = await createImageBitmap(file);   // an error here is cheaper than one after the upload
  try {
    if (SENT_AS_THEY_ARE.includes(file.type) && file.size < MAX_FILE_BYTES) return await readUrl(file);
    const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
    const canvas = element("canvas");
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/jpeg", .92);
  } finally {
    bitmap.close();
  }
}

/* The images of `files`, clips among them (`isClip`), and a sentence for each file that is none. */
export async function readImages(files, {takesImages, takesVideos}) {
  const images = [], refused = [];
  for (const file of files) {
    const name = file.name || "image";
    if (!takesImages) refused.push(`“${name}” was not added: this model reads text only.`);
    else if (file.type.startsWith("video/") && takesVideos) {
      if (file.size > MAX_CLIP_BYTES) refused.push(`“${name}” was not added: it is larger than ${MAX_CLIP_BYTES / 1e6} MB. Cut it, or make it smaller.`);
      else images.push({id: newId(), name, url: await readUrl(file), isClip: true});
    } else if (!file.type.startsWith("image/")) {
      const kind = file.type === "application/pdf" ? "a PDF" : file.type ? "of type " + file.type : "of an unknown type";
      refused.push(`“${name}” was not added: it is ${kind}, and the model reads text${takesVideos ? ", images and videos" : " and images"}. Add a picture of it, or paste its text.`);
    } else {
      try { images.push({id: newId(), name, url: await imageUrl(file)}); }
      catch { refused.push(`“${name}” was not added: it cannot be read as an image. It may be damaged, or of a format that this browser does not know.`); }
    }
  }
  return {images, refused};
}

/* A row of small images, each a button that enlarges it. */
export function thumbnails(images) {
  return images.map(image => {
    if (!image.url) return element("span", "dropped", `${image.name}: not kept by this browser; the model does not see it any more`);
    if (image.isClip) return strip(image, () => play(image));
    const small = element("img");
    small.src = image.url;
    small.alt = image.name;
    return button("thumbnail", "Enlarge " + image.name, () => enlarge(image), small);
  });
}

function view(isClip) {
  $("large").hidden = isClip;
  $("film").hidden = !isClip;
  $("no-film").hidden = true;
  $("viewer").showModal();
}

function enlarge({url, name}) {
  $("large").src = url;
  $("large").alt = name;
  view(false);
}

function play({url, name}) {
  $("film").src = url;
  $("film").setAttribute("aria-label", name);
  view(true);
  $("film").play().catch(() => {});   // a browser that plays nothing by itself shows its button
}

export function startViewer() {
  $("viewer").onclick = event => { if (event.target !== $("film")) $("viewer").close(); };
  $("film").onerror = () => { $("film").hidden = true; $("no-film").hidden = !$("viewer").open; };
  $("viewer").onclose = () => {
    $("film").pause();
    $("film").removeAttribute("src");
  };
}

/* Shows sentences above the question until they are closed; none: hides them. */
export function notice(sentences) {
  $("notice").hidden = !sentences.length;
  $("notice").replaceChildren(
    element("div", "", ...sentences.map(text => element("p", "", text))),
    button("quiet", "Close", () => notice([]), icon("close")));
}
