"use strict";
/* Shared helpers, then theme, enlarged pictures, sliders, printing and copying. Text is only ever set as text. */

const named = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const read = (id) => JSON.parse(named(id).textContent);
const reader = (text) => {
  named("told").textContent = text;
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

all(".needs-script").forEach((one) => {
  one.hidden = false;
});

{
  const button = named("theme"),
    dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const name = () => {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  dark.addEventListener("change", name);
  name();
}

all(".enlarge").forEach((button) =>
  button.addEventListener("click", () => {
    const small = button.querySelector("img"),
      large = named("enlarged-picture");
    large.src = small.src;
    large.alt = small.alt;
    const shape = small.getAttribute("width") / small.getAttribute("height");
    large.style.width = `min(100%, calc(76vh * ${shape}))`; // fills the screen
    named("enlarged-title").textContent = button.dataset.title;
    named("enlarged-caption").textContent = button.closest("figure").querySelector("figcaption").textContent;
    named("enlarged").showModal();
  }),
);
named("enlarged").addEventListener("click", (event) => {
  if (event.target === event.currentTarget) event.currentTarget.close(); // click outside the picture
});

all(".slider").forEach((figure) => {
  const input = figure.querySelector("input");
  const place = () => figure.style.setProperty("--at", `${input.value}%`);
  input.addEventListener("input", place);
  place();
});

/* Settings are collapsed on the screen and expanded in print. */
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = all("details.settings:not([open])");
  unfolded.forEach((one) => {
    one.open = true;
  });
});
addEventListener("afterprint", () =>
  unfolded.forEach((one) => {
    one.open = false;
  }),
);

all(".copy").forEach((button) =>
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
      reader("Copied");
    } catch {
      // no permission: select the text for copying by hand
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
      reader("Selected; copy it by hand");
    }
    setTimeout(() => {
      button.textContent = "Copy";
    }, 2000);
  }),
);

/* Lines and classes differ in colour and, for readers who cannot see it, in dashes or shape. */
const COLOURS = 10;
const colour = (i) => `var(--c${i % COLOURS})`;
