// The server's answers, and a queue of decisions: a key press counts at once, whatever the network does.
const KEPT = "lacuna-unsent", NAME = "lacuna-name";
let queue = JSON.parse(sessionStorage.getItem(KEPT) || "[]"), sending = false, answered = () => {}, failed = () => {};

export const who = () => localStorage.getItem(NAME) || "";
export function callMe(name) { localStorage.setItem(NAME, name); }

export async function ask(path, body, options = {}) {
  const sent = body ? { method: "POST", headers: { "X-Lacuna": "1", "Content-Type": "application/json" }, body: JSON.stringify(body), ...options } : {};
  const answer = await fetch(path, sent), found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error), { refused: true });
  return found;
}

export const list = (view, cls, start, count) => ask(`api/list?${new URLSearchParams({ view, class: cls, start, count, who: who() })}`);

export function listen(onAnswer, onFailure) {
  [answered, failed] = [onAnswer, onFailure];
  pump();
}

export function unsent() { return queue.length; }

export function send(action) {
  const id = [...crypto.getRandomValues(new Uint32Array(3))].map((n) => n.toString(36)).join("");
  queue.push({ ...action, id });
  keep();
  pump();
}

function keep() { sessionStorage.setItem(KEPT, JSON.stringify(queue)); }

async function pump() {
  if (sending) return;
  sending = true;
  while (queue.length) {
    const batch = queue.slice(0, 100);
    try {
      const found = await ask("api/decide", { who: who(), actions: batch });
      queue.splice(0, batch.length);
      keep();
      await answered(found);
    } catch (error) {
      failed(error);
      if (error.refused) { queue.splice(0, batch.length); keep(); } else await new Promise((done) => setTimeout(done, 1500));
    }
  }
  sending = false;
}

// What is not on its way yet when the page goes stays in sessionStorage, too; an id that comes twice counts once.
addEventListener("pagehide", () => {
  if (queue.length) ask("api/decide", { who: who(), actions: queue.slice(0, 100) }, { keepalive: true }).catch(() => {});
});
