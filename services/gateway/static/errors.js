/* What went wrong, in a person's words: what happened, and what to do next. */
const NEXT_LATER = seconds => seconds ? `Try again in ${seconds} s.` : "Try again in a moment.";
const BY_CODE = {
  context_length_exceeded: ["The conversation is longer than the model can read.", "Start a new chat, or ask with less text or fewer images."],
  payload_too_large: ["The question and its images are too large to send.", "Edit the question and remove images, or use smaller ones."],
  rate_limit_exceeded: ["Your limit of requests is used up for now.", NEXT_LATER],
  overloaded: ["The server has too much to do.", NEXT_LATER],
  unavailable: ["A part of the server is missing; it may still be starting.", NEXT_LATER],
  deadline_exceeded: ["The answer took longer than the server allows.", "Ask for a shorter answer, or set its length in the settings."],
  model_not_found: ["The server does not serve this model any more.", "Reload the page."],
};
const BY_STATUS = {
  401: ["The server does not accept your API key.", "Enter another key in the settings."],
  403: ["The server refuses requests of this page or key.", "Open the page under the server's own address, or ask who runs it."],
  413: BY_CODE.payload_too_large,
  429: BY_CODE.overloaded,
  502: BY_CODE.unavailable,
  503: BY_CODE.unavailable,
  504: BY_CODE.deadline_exceeded,
};
const LOST = ["The connection ended before the answer did.", "Try again."];
const UNREACHABLE = ["The server cannot be reached.", "It may have stopped, or the network is down. Try again in a moment."];
const FAILED = ["The server failed.", "Try again. If it happens again, show the details to who runs the server."];
const REFUSED = ["The server does not take this question.", "The details say why. Edit the question or the settings, and try again."];

/* An answer that is an error, or an error event within one. */
export class ServerError extends Error {
  constructor(status, {message, code, param} = {}, {wait, requestId} = {}) {
    super(message ?? "status " + status);
    Object.assign(this, {status, code, param, wait, requestId});
  }
}

/* The stream ended without its end. */
export class LostAnswer extends Error {}

/* The error as {what, next, details, isFinal}; `imageAt(message, part)` names an image of the request. The same request
   fails again if the error is final. */
export function explain(error, imageAt) {
  if (error instanceof LostAnswer) return words(LOST);
  if (!(error instanceof ServerError)) return words(UNREACHABLE, error.message);
  const {status, code, param} = error;
  const details = [status, code, error.message, error.requestId && "request " + error.requestId].filter(Boolean).join(" · ");
  const place = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(param ?? "");
  const image = place && imageAt(Number(place[1]), Number(place[2]));
  if (image) {
    const why = error.message.replace(param + ": ", "").replace(/(\d)x(\d)/g, "$1 × $2");
    return {what: `“${image}” was refused: ${why}.`, next: "Edit the question and remove the image, or use another one.", details, isFinal: status < 500};
  }
  return words(BY_CODE[code] ?? BY_STATUS[status] ?? (status < 500 ? REFUSED : FAILED), details, error.wait);
}

function words([what, next], details, wait) {
  return {what, next: typeof next === "function" ? next(wait) : next, details};
}
