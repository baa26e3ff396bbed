/* Embedding map: hover or arrow keys show an image, click or Enter its neighbours; the legend highlights a class. */

const FORMS = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
  "M-3.6 -3.6h7.2v7.2h-7.2z",
  "M0 -4.8L4.4 3.4H-4.4z",
  "M0 -5L4.6 0L0 5L-4.6 0z",
];
const form = (label) => FORMS[label < 0 ? 0 : (label + Math.floor(label / COLOURS)) % FORMS.length];
const fill = (label) => (label < 0 ? "var(--soft)" : colour(label));

function map(figure) {
  const id = figure.dataset.map,
    data = read(`${id}-data`),
    sprite = figure.querySelector(".sprite");
  const field = figure.querySelector(".field"),
    panel = figure.querySelector(".panel");
  const legend = figure.querySelector(".legend"),
    search = figure.querySelector("[type=search]");
  const SIDE = 600,
    EDGE = 14;
  let projection = Object.keys(data.projections)[0],
    alone = null,
    current = null,
    chosen = null;
  const belongs = (i) => (data.labels[i] >= 0 ? (data.classes[data.labels[i]] ?? "") : "");
  const of = (i) =>
    data.projections[projection].map((axis, k) => EDGE + (SIDE - 2 * EDGE) * (k ? 1 - axis[i] : axis[i]));

  function thumbnail(i, size) {
    const canvas = element("canvas", {
      class: "thumbnail",
      width: data.side,
      height: data.side,
      role: "img",
      "aria-label": data.names[i],
    });
    canvas.style.width = `${size}px`;
    const place = [(i % data.columns) * data.side, Math.floor(i / data.columns) * data.side];
    const paint = () =>
      canvas.getContext("2d").drawImage(sprite, ...place, data.side, data.side, 0, 0, data.side, data.side);
    if (sprite.complete && sprite.naturalWidth) paint();
    else sprite.addEventListener("load", paint, { once: true });
    return canvas;
  }

  // without an initial size, the points would be animated from the corner
  const svg = drawn("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, "aria-hidden": "true", style: "--dot: 1" });
  const links = drawn("g", { class: "links" }),
    dots = drawn("g"),
    ring = drawn("circle", { class: "ring", r: 9, visibility: "hidden" });
  const marks = data.names.map((_, i) =>
    drawn("path", { class: "dot", d: form(data.labels[i]), fill: fill(data.labels[i]) }),
  );
  dots.append(...marks);
  svg.append(links, dots, ring);
  const tip = element("div", { class: "tip", "aria-hidden": "true" });
  tip.hidden = true;
  field.append(svg, tip);
  figure.querySelector("datalist").append(...data.names.map((name) => element("option", { value: name })));

  const choices = data.classes.map((name, label) => {
    const sample = drawn("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true" });
    sample.append(drawn("path", { d: form(label), fill: fill(label) }));
    const button = element("button", { type: "button", "aria-pressed": "false" }, sample, name);
    button.addEventListener("click", () => {
      alone = alone === label ? null : label;
      choices.forEach((one, i) => one.setAttribute("aria-pressed", i === alone));
      marks.forEach((mark, i) => mark.classList.toggle("faded", alone !== null && data.labels[i] !== alone));
    });
    return button;
  });
  legend.append(...choices);
  legend.hidden = !choices.length;

  function place() {
    marks.forEach((mark, i) => {
      const [x, y] = of(i);
      mark.style.transform = `translate(${x}px,${y}px) scale(var(--dot))`;
    });
    connect();
    if (current !== null) show(current);
  }
  function connect() {
    links.replaceChildren();
    marks.forEach((mark, i) => {
      mark.classList.toggle("chosen", i === chosen);
      mark.classList.toggle("near", chosen !== null && data.neighbours[chosen].includes(i));
    });
    if (chosen === null) return;
    const [x, y] = of(chosen);
    links.append(drawn("circle", { cx: x, cy: y, r: 12 }));
    for (const other of data.neighbours[chosen])
      links.append(drawn("path", { d: `M${x} ${y}L${of(other).join(" ")}` }));
  }
  function show(i) {
    // null: none
    current = i;
    tip.hidden = i === null;
    ring.setAttribute("visibility", i === null ? "hidden" : "visible");
    if (i === null) return;
    const [x, y] = of(i);
    ring.setAttribute("cx", x);
    ring.setAttribute("cy", y);
    tip.replaceChildren(thumbnail(i, 96), element("b", {}, data.names[i]));
    if (belongs(i)) tip.append(element("span", {}, belongs(i)));
    tip.style.left = `${(100 * x) / SIDE}%`;
    tip.style.top = `${(100 * y) / SIDE}%`;
    tip.style.transform = `translate(${x > SIDE / 2 ? "calc(-100% - 14px)" : "14px"}, ${y > SIDE / 2 ? "-100%" : "0"})`;
  }
  function entry(i, similarity) {
    const text = [element("b", {}, data.names[i])];
    if (belongs(i)) text.push(element("span", {}, belongs(i)));
    if (similarity !== undefined) text.push(element("span", { class: "quiet" }, `similarity ${similarity.toFixed(2)}`));
    return [thumbnail(i, similarity === undefined ? 72 : 48), element("span", { class: "text" }, ...text)];
  }
  function choose(i) {
    const inside = panel.contains(document.activeElement);
    chosen = i;
    connect();
    const title = element("div", { class: "asked", tabindex: "-1" }, ...entry(i));
    const list = element("ol");
    data.neighbours[i].forEach((other, k) => {
      const button = element("button", { type: "button" }, ...entry(other, data.similarities[i][k]));
      button.addEventListener("click", () => choose(other));
      button.addEventListener("pointerenter", () => show(other));
      button.addEventListener("focus", () => show(other));
      list.append(element("li", {}, button));
    });
    panel.replaceChildren(title, element("p", { class: "quiet" }, "Nearest images, most similar first:"), list);
    if (inside) title.focus(); // the pressed button no longer exists
  }

  function nearest(event, reach) {
    const frame = svg.getBoundingClientRect(),
      zoom = SIDE / frame.width;
    const x = (event.clientX - frame.left) * zoom,
      y = (event.clientY - frame.top) * zoom;
    let best = null,
      least = (reach * zoom) ** 2;
    marks.forEach((_, i) => {
      if (alone !== null && data.labels[i] !== alone) return;
      const [px, py] = of(i),
        apart = (px - x) ** 2 + (py - y) ** 2;
      if (apart < least) [best, least] = [i, apart];
    });
    return best;
  }
  function towards(dx, dy) {
    // the nearest image in a direction; sideways distance counts double
    if (current === null) return chosen ?? 0;
    const [x, y] = of(current);
    let best = current,
      least = Infinity;
    marks.forEach((_, i) => {
      if (alone !== null && data.labels[i] !== alone) return;
      const [px, py] = of(i),
        ahead = (px - x) * dx + (py - y) * dy,
        aside = Math.abs((px - x) * dy + (py - y) * dx);
      if (i !== current && ahead > 0 && ahead + 2 * aside < least) [best, least] = [i, ahead + 2 * aside];
    });
    return best;
  }
  field.addEventListener("pointermove", (event) => show(nearest(event, 24)));
  field.addEventListener("pointerleave", () => show(null));
  field.addEventListener("click", (event) => {
    const found = nearest(event, 24);
    if (found !== null) {
      show(found);
      choose(found);
    }
  });
  field.addEventListener("blur", () => show(null));
  field.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (way) {
      show(towards(...way));
      reader([data.names[current], belongs(current)].filter(Boolean).join(", "));
    } else if ((event.key === "Enter" || event.key === " ") && current !== null) choose(current);
    else if (event.key === "Escape") show(null);
    else return;
    event.preventDefault();
  });
  panel.addEventListener("pointerleave", () => show(null));
  panel.addEventListener("focusout", () => show(null));
  search.addEventListener("change", () => {
    const asked = search.value.trim().toLowerCase();
    if (!asked) return;
    let found = data.names.findIndex((name) => name.toLowerCase() === asked);
    if (found < 0) found = data.names.findIndex((name) => name.toLowerCase().includes(asked));
    if (found < 0) return reader("No image on the map has this name");
    choose(found);
    show(found);
  });
  all("[type=radio]", figure).forEach((radio) =>
    radio.addEventListener("change", () => {
      projection = radio.value;
      place();
    }),
  );
  // dots have the same size on the screen for any width of the map, and are smaller if there are many
  const size = data.names.length < 250 ? 1.4 : data.names.length < 1000 ? 1.1 : 0.85;
  new ResizeObserver(() => svg.style.setProperty("--dot", (size * SIDE) / (field.clientWidth || SIDE))).observe(field);
  place();
}

all("[data-map]").forEach(map);
