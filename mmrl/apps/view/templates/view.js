// Keeps the page up to date: asks whether it has changed, and exchanges the parts that have.
const title = document.title;
let tag = "";

function parts(root) {
  return new Map([...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
}

// What the server sent for a part: the page itself may since have been changed by its reader.
const sent = new Map([...parts(document)].map(([name, part]) => [name, part.innerHTML]));

function keep(old, part) {
  const open = [...old.querySelectorAll("details")].map((item) => item.open);
  part.querySelectorAll("details").forEach((item, i) => { if (i < open.length) item.open = open[i]; });
  const slider = old.querySelector("input[type=range]");
  const fresh = part.querySelector("input[type=range]");
  if (slider && fresh && slider.value !== slider.max) fresh.value = slider.value;
  const places = [...old.querySelectorAll(".scroll")].map((item) => item.scrollLeft);
  return () => part.querySelectorAll(".scroll").forEach((item, i) => { item.scrollLeft = places[i] || 0; });
}

function ready(part) {
  part.querySelectorAll("svg[data-plot]").forEach(followPointer);
  part.querySelectorAll(".gallery").forEach(gallery);
}

function exchange(page) {
  const here = parts(document);
  let before = null;
  for (const [name, part] of parts(page)) {
    const html = part.innerHTML;
    const old = here.get(name);
    if (!old) {
      const fresh = document.importNode(part, true);
      if (before) before.after(fresh); else document.querySelector("main h1, main nav").after(fresh);
      ready(fresh);
      before = fresh;
    } else if (sent.get(name) !== html) {
      const fresh = document.importNode(part, true);
      const scroll = keep(old, fresh);
      old.replaceWith(fresh);
      scroll();
      ready(fresh);
      before = fresh;
    } else {
      before = old;
    }
    sent.set(name, html);
    here.delete(name);
  }
  for (const old of here.values()) old.remove();
  warn();
}

function warn() {
  const marked = document.querySelector("[data-alarms]");
  document.title = marked ? `(${marked.dataset.alarms}) ${title}` : title;
}

async function look() {
  const state = document.getElementById("connection");
  if (document.visibilityState !== "visible") return;
  try {
    const answer = await fetch(location.pathname + location.search, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    state.textContent = "";
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
    }
  } catch {
    state.textContent = "the server has stopped; this is what it last said";
  }
}

// One moment of the galleries at a time.
function gallery(box) {
  const urls = JSON.parse(box.dataset.urls);
  const labels = JSON.parse(box.dataset.labels);
  const slider = box.querySelector("input");
  const pictures = box.querySelectorAll("img, video");
  let timer = 0;
  const show = () => {
    const chosen = urls[slider.value];
    pictures.forEach((picture, i) => { if (chosen[i]) picture.src = chosen[i]; });
    box.querySelector("output").textContent = labels[slider.value];
  };
  const stop = () => { clearInterval(timer); timer = 0; box.querySelector(".play").textContent = "▶"; };
  slider.addEventListener("input", () => { stop(); show(); });
  box.querySelector(".play").addEventListener("click", () => {
    if (timer) return stop();
    if (slider.value === slider.max) slider.value = 0;
    box.querySelector(".play").textContent = "❚❚";
    show();
    timer = setInterval(() => {
      if (!box.isConnected || slider.value === slider.max) return stop();
      slider.value = Number(slider.value) + 1;
      show();
    }, 600);
  });
  if (slider.value !== slider.max) show();
}

document.querySelectorAll(".gallery").forEach(gallery);
warn();

// A page that takes long to make is asked for less often: watching must not slow the training.
async function watch() {
  const began = performance.now();
  await look();
  setTimeout(watch, Math.max(2000, 10 * (performance.now() - began)));
}
setTimeout(watch, 1000);
document.addEventListener("visibilitychange", look);
