// Shows pairs and sends ratings. Texts of models are set as text, never as markup.
const page = document.querySelector("main");
const sides = [...document.querySelectorAll(".side")];
const message = document.getElementById("message");
let number = "";
let busy = false;

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { "X-Token": page.dataset.token }, cache: "no-store" });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || answer.statusText);
  return content;
}

// Loads a picture or a film; small ones are enlarged with sharp pixels. What is not seen cannot be rated.
function load(picture, address) {
  return new Promise((resolve, reject) => {
    picture.onload = picture.onloadeddata = () => { picture.classList.toggle("pixel", (picture.naturalWidth || picture.videoWidth) <= 128); resolve(); };
    picture.onerror = () => reject(new Error("A picture could not be loaded: skip this pair."));
    picture.src = address;
  });
}

async function fill(place, side) {
  place.replaceChildren();
  if (side.picture) {
    const picture = document.createElement(side.film ? "video" : "img");
    if (side.film) Object.assign(picture, { muted: true, autoplay: true, loop: true, playsInline: true });
    else picture.alt = "a sample";
    place.append(picture);
    await load(picture, side.picture);
  } else {
    place.textContent = side.text;
  }
}

async function next() {
  const { pair, rated, total } = await ask("/rate/pair");
  document.getElementById("progress").textContent = `${rated} rated, ${total} pairs`;
  number = pair ? pair.number : "";
  document.getElementById("prompt").textContent = pair ? pair.prompt : "Every pair is rated. New ones come with new samples.";
  const question = document.getElementById("question");
  question.hidden = !pair || !pair.picture;
  const loading = pair && pair.picture ? [load(question, pair.picture)] : [];
  sides.forEach((side, i) => {
    side.disabled = !pair;
    side.classList.remove("chosen");
    loading.push(fill(side.querySelector(".answer"), pair ? pair.sides[i] : { text: "" }));
  });
  try {
    await Promise.all(loading);
  } catch (error) {
    number = "";
    throw error;
  }
}

async function act(work) {
  if (busy) return;
  busy = true;
  message.textContent = "";
  try {
    await work();
    await next();
  } catch (error) {
    message.textContent = `${error.message}`;
  }
  busy = false;
}

function rate(choice) {
  if (!number) return;
  sides[choice - 1]?.classList.add("chosen");
  act(() => ask(`/rate/pairs/${number}/${choice}`, { method: "POST" }));
}

function undo() { act(() => ask("/rate/undo", { method: "POST" })); }
function skip() { act(async () => {}); }

document.querySelectorAll("[data-choice]").forEach((button) => button.addEventListener("click", () => rate(button.dataset.choice)));
document.getElementById("undo").addEventListener("click", undo);
document.getElementById("skip").addEventListener("click", skip);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  if (["0", "1", "2"].includes(event.key)) rate(event.key);
  else if (event.key === "u") undo();
  else if (event.key === "s") skip();
});
skip();
