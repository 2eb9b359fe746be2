"use strict";
(() => {
  const figure = document.getElementById("errors");
  const chart = figure.querySelector(".chart");
  const rows = [...figure.querySelectorAll(".numbers tbody tr")];
  const places = rows.map((row) => Number(row.dataset.x));
  const slider = figure.querySelector("input[type=range]");
  const cursor = figure.querySelector(".cursor");
  const readings = figure.querySelectorAll(".legend data");
  const scales = figure.querySelector(".scales");

  // The table of all numbers is the one source of what the legend reads out.
  const show = (index) => {
    const lead = rows[index].cells[0].textContent;
    figure.querySelector("output").textContent = lead;
    readings.forEach((reading, i) => { reading.textContent = rows[index].cells[i + 1].textContent; });
    cursor.setAttribute("transform", `translate(${places[index]} 0)`);
    cursor.setAttribute("visibility", "visible");
    chart.querySelectorAll("circle").forEach((dot) => dot.classList.toggle("on", Number(dot.dataset.lead) === index));
    if (slider) {
      slider.value = index;
      slider.setAttribute("aria-valuetext", `lead ${lead}`);
    }
  };

  const nearest = (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
    const distances = places.map((place) => Math.abs(place - x));
    return distances.indexOf(Math.min(...distances));
  };

  for (const kind of ["pointermove", "pointerdown"]) {
    chart.addEventListener(kind, (event) => show(nearest(event)));
  }
  if (slider) {
    slider.hidden = false;
    slider.addEventListener("input", () => show(Number(slider.value)));
  }
  if (scales) {
    scales.hidden = false;
    const choose = () => { figure.dataset.scale = scales.querySelector(":checked").value; };
    scales.addEventListener("change", choose);
    choose(); // a reloaded page may remember the choice
  }
  show(rows.length - 1);
})();

(() => {
  const player = document.getElementById("player");
  if (!player) return;
  const reels = [...player.querySelectorAll(".reels > div")];
  const selects = Object.fromEntries([...player.querySelectorAll("select")].map((one) => [one.name, one]));
  const slider = player.querySelector("input[type=range]");
  const button = player.querySelector("button");
  const canvases = [...player.querySelectorAll("canvas")];
  const number = player.querySelector(".error-number");
  const lead = player.querySelector(".lead-number");
  let reel = null;
  let timer = null;

  const distinct = (values) => [...new Set(values)];
  const fill = (name, values) => {
    const before = selects[name].value;
    selects[name].replaceChildren(...values.map((value) => new Option(value, value)));
    if (values.includes(before)) selects[name].value = before;
    // What cannot be chosen is not asked for.
    player.querySelector(`[data-of=${name}]`).hidden = values.length < 2;
  };

  const draw = () => {
    const leads = reel.dataset.leads.split("|");
    const index = Number(slider.value);
    const model = selects.model.value;
    const { width, height } = reel.dataset;
    for (const canvas of canvases) {
      const kind = canvas.dataset.kind;
      const strip = [...reel.querySelectorAll(`img[data-kind=${kind}]`)].find((one) => kind === "truth" || one.dataset.model === model);
      canvas.width = width;
      canvas.height = height;
      const paint = () => canvas.getContext("2d").drawImage(strip, 0, index * height, width, height, 0, 0, width, height);
      if (strip.complete) paint(); else strip.addEventListener("load", draw, { once: true });
      const words = kind === "truth" ? "truth" : `${kind} of ${model}`;
      canvas.setAttribute("aria-label", `${reel.dataset.field}, ${words}, lead ${leads[index]}`);
      if (kind === "error") number.textContent = strip.dataset.notes.split("|")[index];
    }
    lead.textContent = `${leads[index]} of ${leads[leads.length - 1]}`;
    slider.setAttribute("aria-valuetext", `lead ${leads[index]}`);
  };

  const choose = () => {
    fill("field", distinct(reels.filter((one) => one.dataset.case === selects.case.value).map((one) => one.dataset.field)));
    const same = reels.filter((one) => one.dataset.case === selects.case.value && one.dataset.field === selects.field.value);
    fill("plane", distinct(same.map((one) => one.dataset.plane)));
    reel = same.find((one) => one.dataset.plane === selects.plane.value);
    slider.max = reel.dataset.leads.split("|").length - 1;
    player.querySelector(".bars-shown").replaceChildren(reel.querySelector(".bars").cloneNode(true));
    draw();
  };

  const stop = () => {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
    button.setAttribute("aria-pressed", "false");
  };
  const play = () => {
    if (Number(slider.value) === Number(slider.max)) slider.value = 0;
    button.textContent = "Pause";
    button.setAttribute("aria-pressed", "true");
    draw();
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      draw();
      if (Number(slider.value) === Number(slider.max)) stop();
    }, 450);
  };

  fill("case", distinct(reels.map((one) => one.dataset.case)));
  fill("model", distinct([...reels[0].querySelectorAll("[data-model]")].map((one) => one.dataset.model)));
  for (const name of ["case", "field", "plane"]) selects[name].addEventListener("change", choose);
  selects.model.addEventListener("change", draw);
  slider.addEventListener("input", () => { stop(); draw(); });
  button.addEventListener("click", () => (timer === null ? play() : stop()));
  player.hidden = false;
  choose();
})();
