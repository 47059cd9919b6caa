/* Clips: what the model will see of one, and what that costs, is asked of the server when it is added. The frames are
   drawn by the browser, at the times that the server says, if it can play the file. */
import {button, element, icon, markScroll} from "./dom.js";

const MAX_DRAWN = 8, DRAW_TIMEOUT_MS = 10000, LATE_MS = 3000;

export const videoPart = url => ({type: "video_url", video_url: {url}});

/* {frames, fps, tokens, size, times} of a clip; `call` asks the server. */
export async function seenOf(url, model, call) {
  const messages = [{role: "user", content: [videoPart(url)]}];
  const answer = await call("tokenize", {method: "POST", body: JSON.stringify({model, messages})});
  return (await answer.json()).videos[0];
}

/* A clip's frames, its cost, and a button that plays it by `onPlay`. */
export function strip({name, url, seen}, onPlay) {
  const frames = element("div", "frames"), play = button("play", "Play " + name, onPlay, icon("play"));
  const made = element("div", "clip", frames, element("div", "cost", play, element("span", "", cost(seen))));
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", `${name}: ${cost(seen)}`);
  markScroll(frames);
  draw(url, spread(seen?.times ?? []), frames).catch(() => {
    frames.replaceChildren(element("span", "", name));
    play.hidden = true;   // nor would the browser play it
  });
  return made;
}

function cost(seen) {
  if (!seen) return "video";
  return `${seen.frames} frames, ${seen.fps.toFixed(1)} a second · ${seen.tokens.toLocaleString("en")} tokens`;
}

/* At most MAX_DRAWN of them, evenly. */
function spread(times) {
  const step = Math.max(1, (times.length - 1) / (MAX_DRAWN - 1));
  return times.length <= MAX_DRAWN ? times : Array.from({length: MAX_DRAWN}, (_, i) => times[Math.round(i * step)]);
}

const happened = (target, name) => new Promise((resolve, reject) => {
  target.addEventListener(name, resolve, {once: true});
  target.addEventListener("error", reject, {once: true});
  setTimeout(reject, DRAW_TIMEOUT_MS);
});

/* Resolves when a frame behind `last` seconds can be drawn, with its time: after "seeked" the one before may still be
   there. Where there is no such frame it takes LATE_MS; where the browser does not say so, nothing is waited for. */
const presented = (player, last) => new Promise(resolve => {
  const look = (now, {mediaTime}) => mediaTime > last ? resolve(mediaTime) : player.requestVideoFrameCallback(look);
  player.requestVideoFrameCallback?.(look);
  setTimeout(() => resolve(last), player.requestVideoFrameCallback ? LATE_MS : 0);
});

async function draw(url, times, into) {
  const player = element("video");
  player.muted = true;
  player.preload = "auto";
  const loaded = happened(player, "loadeddata");
  player.src = url;
  await loaded;
  let last = 0;
  for (const time of times.length ? times : [0]) {
    const sought = happened(player, "seeked"), shown = presented(player, last);
    player.currentTime = Math.max(time, .001);
    await sought;
    last = await shown;
    const canvas = element("canvas"), scale = 112 / player.videoHeight;
    canvas.width = Math.round(player.videoWidth * scale);
    canvas.height = 112;
    canvas.getContext("2d").drawImage(player, 0, 0, canvas.width, canvas.height);
    into.append(element("figure", "frame", canvas, element("figcaption", "", time.toFixed(1) + " s")));
  }
  player.removeAttribute("src");
  player.load();
}
