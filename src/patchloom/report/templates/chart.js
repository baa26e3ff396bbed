/* Curves: hover or arrow keys read values; dragging, + and - zoom; a double click, Escape or a button resets. */

function ticks(low, high, count) {
  const raw = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function chart(plot) {
  const id = plot.dataset.chart,
    data = read(`${id}-data`);
  const lines = data.lines.map((line) => ({ ...line, shown: true }));
  const places = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  if (!places.length) return plot.append(element("p", { class: "quiet" }, "No measurements yet."));
  const whole = [places[0], places.at(-1)];
  if (whole[0] === whole[1]) {
    whole[0] -= 0.5;
    whole[1] += 0.5;
  }
  let seen = [...whole],
    cursor = null,
    from = null,
    scale;
  const written = (y) =>
    y === null ? "–" : data.percent ? `${(100 * y).toFixed(1)} %` : `${Number(y.toPrecision(4))}`;
  const located = (x) => `${data.along} ${Number(x.toFixed(2)) || x}`;
  const near = (line, x) =>
    line.points.reduce(
      (best, point) => (point[1] !== null && (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) ? point : best),
      null,
    );
  const at = (line, x) => {
    // a baseline of two points is constant; other lines are read at their own points
    const points = line.points.filter((point) => point[1] !== null);
    if (!points.length || x < points[0][0] || x > points.at(-1)[0]) return null;
    return near(line, x);
  };
  const paint = (line) => (line.baseline ? "var(--soft)" : colour(line.number));
  const dashes = (line) =>
    line.baseline
      ? ["2 4", "8 4 2 4", "6 6"][line.number % 3]
      : ["none", "9 3", "5 3", "12 3 3 3"][Math.floor(line.number / COLOURS) % 4];

  const legend = element("div", { class: "legend", role: "group", "aria-label": "Lines: press to hide or show" });
  for (const line of lines) {
    const sample = drawn("svg", { width: 26, height: 10, "aria-hidden": "true" });
    sample.append(
      drawn("path", { d: "M1 5H25", stroke: paint(line), "stroke-dasharray": dashes(line), class: "line" }),
    );
    const button = element("button", { type: "button", "aria-pressed": "true" }, sample, line.name);
    button.addEventListener("click", () => {
      line.shown = !line.shown;
      button.setAttribute("aria-pressed", line.shown);
      draw();
    });
    legend.append(button);
  }
  const svg = drawn("svg", {
    class: "axes",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": `${data.title}. Left and right arrows read values, plus and minus zoom, Escape shows all.`,
  });
  const tip = element("div", { class: "tip", "aria-hidden": "true" });
  tip.hidden = true;
  const tool = (text, name, act) => {
    const button = element("button", { type: "button", "aria-label": name }, text);
    button.addEventListener("click", act);
    return button;
  };
  const reset = tool("Show all", `Show all of ${data.title}`, () => show(whole));
  const tools = element(
    "div",
    { class: "tools" },
    tool("+", "Zoom in", () => zoom(0.5)),
    tool("−", "Zoom out", () => zoom(2)),
    reset,
  );
  plot.append(legend, element("div", { class: "canvas" }, svg, tip), tools);

  function show([low, high]) {
    const least = (whole[1] - whole[0]) / 1000;
    if (high - low < least) return;
    seen = [Math.max(low, whole[0]), Math.min(high, whole[1])];
    draw();
  }
  function zoom(by) {
    const middle = cursor ?? (seen[0] + seen[1]) / 2,
      half = ((seen[1] - seen[0]) * by) / 2;
    show(by > 1 && 2 * half >= whole[1] - whole[0] ? whole : [middle - half, middle + half]);
  }
  function heights() {
    // range of the visible points and of one point to either side
    const ys = [],
      shown = lines.filter((one) => one.shown),
      close = seen[0] > whole[0] || seen[1] < whole[1];
    const own = shown.filter((one) => !(close && one.baseline)); // when zoomed in, a distant baseline would flatten the curves
    for (const line of own.length ? own : shown)
      line.points.forEach(([x, y], i) => {
        const before = line.points[i - 1]?.[0] ?? x,
          after = line.points[i + 1]?.[0] ?? x;
        if (y !== null && after >= seen[0] && before <= seen[1]) ys.push(y);
      });
    let low = ys.reduce((a, b) => Math.min(a, b), Infinity),
      high = ys.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low > high) [low, high] = [0, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 && low < room * 4 ? 0 : low - room, high + room];
  }
  function draw() {
    const width = Math.max(280, plot.clientWidth),
      height = Math.min(340, Math.max(230, width * 0.52));
    const [low, high] = heights(),
      up = ticks(low, high, height / 52);
    const label = (y) => (data.percent ? `${(100 * y).toFixed(Math.max(0, up.digits - 2))} %` : y.toFixed(up.digits));
    const box = {
      left: 14 + 7.2 * Math.max(...up.found.map((y) => label(y).length)),
      right: width - 14,
      top: 10,
      bottom: height - 42,
    };
    scale = {
      box,
      x: (x) => box.left + ((x - seen[0]) / (seen[1] - seen[0])) * (box.right - box.left),
      y: (y) => box.bottom - ((y - low) / (high - low)) * (box.bottom - box.top),
      back: (pixel) => seen[0] + ((pixel - box.left) / (box.right - box.left)) * (seen[1] - seen[0]),
    };
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const y of up.found)
      svg.append(
        drawn("path", { class: "grid", d: `M${box.left} ${scale.y(y)}H${box.right}` }),
        drawn("text", { x: box.left - 7, y: scale.y(y) + 4, "text-anchor": "end" }, label(y)),
      );
    const along = ticks(seen[0], seen[1], Math.max(4, width / 110));
    for (const x of along.found)
      svg.append(
        drawn("path", { class: "grid", d: `M${scale.x(x)} ${box.bottom}v5` }),
        drawn("text", { x: scale.x(x), y: box.bottom + 19, "text-anchor": "middle" }, x.toFixed(along.digits)),
      );
    svg.append(drawn("text", { x: (box.left + box.right) / 2, y: height - 5, "text-anchor": "middle" }, data.along));
    const clip = drawn("clipPath", { id: `${id}-clip` });
    clip.append(drawn("rect", { x: box.left, y: 0, width: box.right - box.left, height: box.bottom + 1 }));
    const inside = drawn("g", { "clip-path": `url(#${id}-clip)` });
    for (const line of lines.filter((one) => one.shown)) {
      let pen = "M";
      const path = line.points
        .map(([x, y]) => {
          if (y === null) {
            pen = "M";
            return "";
          }
          const step = `${pen}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`;
          pen = "L";
          return step;
        })
        .join("");
      inside.append(drawn("path", { class: "line", d: path, stroke: paint(line), "stroke-dasharray": dashes(line) }));
      if (line.points.length < 25 && !line.baseline)
        for (const [x, y] of line.points) {
          if (y !== null) inside.append(drawn("circle", { cx: scale.x(x), cy: scale.y(y), r: 2.5, fill: paint(line) }));
        }
    }
    svg.append(
      clip,
      inside,
      drawn("g", { class: "cursor" }),
      drawn("rect", { class: "drag", width: 0, y: box.top, height: box.bottom - box.top }),
    );
    reset.disabled = seen[0] === whole[0] && seen[1] === whole[1];
    point(cursor);
  }
  function point(x) {
    // to the place nearest to x; null: nowhere
    const open = places.filter((place) => place >= seen[0] && place <= seen[1]);
    cursor =
      x === null || !open.length
        ? null
        : open.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best));
    const layer = svg.querySelector(".cursor");
    layer.replaceChildren();
    tip.replaceChildren();
    tip.hidden = cursor === null;
    if (cursor === null) return "";
    const place = scale.x(cursor),
      said = [];
    layer.append(drawn("path", { d: `M${place} ${scale.box.top}V${scale.box.bottom}` }));
    tip.append(element("b", {}, located(cursor)));
    for (const line of lines.filter((one) => one.shown)) {
      const found = at(line, cursor),
        value = written(found?.[1] ?? null);
      if (found)
        layer.append(
          drawn("circle", {
            cx: line.baseline ? place : scale.x(found[0]),
            cy: scale.y(found[1]),
            r: 4,
            fill: paint(line),
          }),
        );
      const swatch = element("i");
      swatch.style.background = paint(line);
      tip.append(element("div", {}, swatch, element("span", {}, line.name), element("span", {}, value)));
      said.push(`${line.name} ${value}`);
    }
    const share = place / svg.viewBox.baseVal.width; // of the width that it is drawn at
    tip.style.left = `${100 * share}%`;
    tip.style.transform = `translateX(${share > 0.5 ? "calc(-100% - 14px)" : "14px"})`;
    return `${located(cursor)}: ${said.join(", ")}`;
  }
  const pixel = (event) => {
    const frame = svg.getBoundingClientRect();
    return ((event.clientX - frame.left) / frame.width) * svg.viewBox.baseVal.width;
  };
  const within = (value) => Math.min(Math.max(value, scale.box.left), scale.box.right);
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    from = within(pixel(event));
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const here = within(pixel(event));
    point(scale.back(here));
    if (from === null) return;
    const area = svg.querySelector(".drag");
    area.setAttribute("x", Math.min(from, here));
    area.setAttribute("width", Math.abs(here - from));
  });
  svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const ends = [from, within(pixel(event))].sort((a, b) => a - b);
    from = null;
    if (ends[1] - ends[0] > 8) show(ends.map(scale.back));
    else svg.querySelector(".drag").setAttribute("width", 0);
  });
  svg.addEventListener("pointercancel", () => {
    from = null;
    svg.querySelector(".drag").setAttribute("width", 0);
  });
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("dblclick", () => show(whole));
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("keydown", (event) => {
    const open = places.filter((place) => place >= seen[0] && place <= seen[1]),
      now = open.indexOf(cursor);
    const step = { ArrowLeft: now < 0 ? open.length - 1 : now - 1, ArrowRight: now + 1, Home: 0, End: open.length - 1 }[
      event.key
    ];
    if (step !== undefined && open.length) reader(point(open[Math.min(Math.max(step, 0), open.length - 1)]));
    else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "Escape" || event.key === "0") show(whole);
    else return;
    event.preventDefault();
  });
  new ResizeObserver(draw).observe(plot);
}

all("[data-chart]").forEach(chart);
