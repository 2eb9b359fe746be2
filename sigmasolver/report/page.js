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
