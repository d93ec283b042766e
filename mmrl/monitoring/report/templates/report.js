// The value under the pointer. The page is complete without it.
function followPointer(svg) {
  const { unit, points } = JSON.parse(svg.dataset.plot);
  const box = svg.viewBox.baseVal;
  const line = document.createElementNS(svg.namespaceURI, "line");
  const tip = document.createElement("div");
  line.setAttribute("class", "cursor");
  line.setAttribute("y1", 10);
  line.setAttribute("y2", box.height - 38);
  tip.className = "tip";
  const hide = () => { line.remove(); tip.remove(); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const at = (event.clientX - frame.left) / frame.width * box.width;
    const [x, px, texts] = points.reduce((a, b) => Math.abs(b[1] - at) < Math.abs(a[1] - at) ? b : a);
    line.setAttribute("x1", px);
    line.setAttribute("x2", px);
    svg.append(line);
    tip.textContent = `${unit} ${x}: ${texts.join(", ")}`;
    svg.parentNode.append(tip);
    const half = tip.offsetWidth / 2;
    tip.style.left = `${Math.min(Math.max(px / box.width * frame.width, half), frame.width - half)}px`;
  });
}
for (const svg of document.querySelectorAll("svg[data-plot]")) followPointer(svg);
