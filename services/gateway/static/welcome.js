/* What the page offers before the first question: the demonstration model is shown its sample images, other models take
   an image of the person's own. */
import {button, element, icon} from "./dom.js";

const DEMONSTRATION = "triptych-demo";
const SAMPLES = [
  ["sample-shapes.png", "What do you see?"], ["sample-count.png", "How many stars are there?"],
  ["sample-word.png", "What word is printed on it?"], ["sample-move.mp4", "What happens?"],
];
const IMAGE_QUESTIONS = ["What is in this image?", "What does the text say?"];
const TEXT_QUESTIONS = ["What can you help me with?", "Write a short poem about the sea."];

/* Buttons for the first question. `write(text)` fills the question in, `choose()` asks for an image, `attach(file)` adds one. */
export function firstQuestions({model, takesImages, takesVideos}, {write, choose, attach}) {
  if (!takesImages) return TEXT_QUESTIONS.map(text => button("", text, () => write(text)));
  if (model !== DEMONSTRATION) {
    return IMAGE_QUESTIONS.map(text => button("", text, () => { write(text); choose(); }, element("span", "", icon("image"), text)));
  }
  return SAMPLES.filter(([name]) => takesVideos || !name.endsWith(".mp4")).map(([name, text]) => {
    const ask = async () => {
      const found = await fetch(new URL(name, import.meta.url));
      await attach(new File([await found.blob()], name.replace("sample-", ""), {type: found.headers.get("content-type")}));
      write(text);
    };
    return button("sample", text, ask, element("span", "", picture(name), text));
  });
}

function picture(name) {
  if (name.endsWith(".mp4")) return icon("play");
  const image = element("img");
  image.src = new URL(name, import.meta.url).href;
  image.alt = "";
  return image;
}
