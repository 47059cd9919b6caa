/* Conversations that were held in this browser: in IndexedDB, the newest MAX_CONVERSATIONS, with the images of the
   newest as far as MAX_IMAGE_BYTES go. An image that was let go keeps its name and is `dropped`. */
const MAX_CONVERSATIONS = 50, MAX_IMAGE_BYTES = 64e6;
const STORES = ["conversations", "images"];

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2);   // randomUUID needs TLS

const result = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

let opening;
function database() {
  return opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("triptych", 1);
    request.onupgradeneeded = () => STORES.forEach(name => request.result.createObjectStore(name, {keyPath: "id"}));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/* Runs `work` on both stores, all of it or nothing. */
async function change(work) {
  const transaction = (await database()).transaction(STORES, "readwrite");
  const [conversations, images] = STORES.map(name => transaction.objectStore(name));
  const end = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  try {
    await work(conversations, images);
    await end;
  } catch (error) {
    end.catch(() => {});
    try { transaction.abort(); } catch { /* it has ended already */ }
    throw transaction.error ?? error;   // a request that ends with its transaction does not say why
  }
}

/* Keeps a conversation {id, turns}; false: without its images, for which this browser has no room. */
export async function keep(conversation) {
  const record = {id: conversation.id, title: conversation.title, changed: Date.now(), turns: conversation.turns.map(turn => ({
    ...turn, images: turn.images.map(({url, isKept, ...kept}) => ({...kept, size: url?.length ?? 0})),
  }))};
  const added = conversation.turns.flatMap(turn => turn.images).filter(image => image.url && !image.isKept);
  try {
    await change(async (conversations, images) => {
      conversations.put(record);
      for (const {id, url} of added) images.put({id, url});
      await prune(conversations, images);
    });
    for (const image of added) image.isKept = true;
    return true;
  } catch (error) {
    if (error?.name !== "QuotaExceededError" || !added.length) throw error;
    const lost = new Set(added.map(image => image.id));
    for (const image of record.turns.flatMap(turn => turn.images)) image.dropped ||= lost.has(image.id);
    await change(async (conversations, images) => {
      conversations.put(record);
      await prune(conversations, images);
    });
    return false;
  }
}

async function prune(conversations, images) {
  const records = newestFirst(await result(conversations.getAll())), kept = new Set();
  let room = MAX_IMAGE_BYTES;
  records.forEach((record, place) => {
    if (place >= MAX_CONVERSATIONS) { conversations.delete(record.id); return; }
    const lost = record.turns.flatMap(turn => turn.images).filter(image => !image.dropped).filter(image => {
      const fits = image.size <= room;
      if (fits) { room -= image.size; kept.add(image.id); } else image.dropped = true;
      return !fits;
    });
    if (lost.length) conversations.put(record);
  });
  for (const id of await result(images.getAllKeys())) if (!kept.has(id)) images.delete(id);
}

const newestFirst = records => records.sort((a, b) => b.changed - a.changed);

/* All kept conversations without their images, newest first. */
export async function kept() {
  const transaction = (await database()).transaction("conversations");
  return newestFirst(await result(transaction.objectStore("conversations").getAll()));
}

/* One conversation with its images, or undefined. */
export async function load(id) {
  const transaction = (await database()).transaction(STORES);
  const record = await result(transaction.objectStore("conversations").get(id));
  for (const image of record?.turns.flatMap(turn => turn.images) ?? []) {
    image.url = (await result(transaction.objectStore("images").get(image.id)))?.url;
    image.dropped = !image.url;
    image.isKept = !image.dropped;
  }
  return record;
}

/* Gives a conversation another title. */
export const rename = (id, title) => change(async conversations => {
  const record = await result(conversations.get(id));
  if (record) conversations.put({...record, title});
});

export const forget = id => change(async (conversations, images) => {
  conversations.delete(id);
  await prune(conversations, images);
});

export const forgetAll = () => change(async (conversations, images) => {
  conversations.clear();
  images.clear();
});
