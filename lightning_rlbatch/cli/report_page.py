"""The frame of a run report: style, layout and the script that shows values under the pointer."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root { --paper: #f6f7f9; --card: #ffffff; --ink: #1c2430; --soft: #6b7787; --grid: #e4e8ee; --line: #d5dbe3;
  --c0: #2166ac; --c1: #d6604d; --c2: #1b8a5a; --c3: #67a9cf; --c4: #a6acb8; --c5: #f4a582; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --card: #1b212a; --ink: #e6eaf0; --soft: #95a0b0; --grid: #2a323d;
  --line: #303946; --c0: #5aa2e0; --c1: #ef8a75; --c2: #4fc08d; --c3: #8cc4e6; --c4: #7c8594; --c5: #e9b18f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1480px; margin: 0 auto; padding: 24px; }
h1 { font-size: 22px; margin: 0; } .about { color: var(--soft); margin: 2px 0 14px; } h2 { font-size: 15px; margin: 22px 0 8px; }
h3 { font-size: 13.5px; margin: 0; font-weight: 600; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; min-width: 104px; }
.tile b { display: block; font-size: 19px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 12px; } .tile small { display: block; color: var(--soft); font-size: 11px; }
.doctor { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--c1); border-radius: 8px;
  padding: 10px 16px; }
.doctor:has(.good) { border-left-color: var(--c2); } .doctor ul { margin: 0; padding-left: 18px; } .doctor p { margin: 0; }
.doctor i { color: var(--soft); font-style: normal; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); gap: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px 6px; position: relative; }
.card.missing { border-style: dashed; align-self: start; } .hint, .note { color: var(--soft); font-size: 12px; margin: 4px 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 11.5px; color: var(--soft); margin: 4px 0 2px; min-height: 17px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums; } svg .unit { font-size: 10px; }
svg text.limit { paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.grid { stroke: var(--grid); } line.limit { stroke: var(--soft); stroke-dasharray: 4 3; } line.cursor { stroke: var(--soft); }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .pale { opacity: .28; stroke-width: 1.1; } polygon { opacity: .85; }
.c0 { background: var(--c0); } .c1 { background: var(--c1); } .c2 { background: var(--c2); }
.c3 { background: var(--c3); } .c4 { background: var(--c4); } .c5 { background: var(--c5); }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); }
.s3 { stroke: var(--c3); } .s4 { stroke: var(--c4); } .s5 { stroke: var(--c5); }
.d0, .a0 { fill: var(--c0); } .d1, .a1 { fill: var(--c1); } .d2, .a2 { fill: var(--c2); }
.d3, .a3 { fill: var(--c3); } .d4, .a4 { fill: var(--c4); } .d5, .a5 { fill: var(--c5); }
.tip { position: absolute; pointer-events: none; background: var(--ink); color: var(--card); font-size: 11.5px; padding: 5px 8px;
  border-radius: 5px; white-space: pre; z-index: 2; display: none; }
figure { margin: 18px 0 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; }
.scroll { overflow-x: auto; } .waiting table { border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums; }
.waiting th { color: var(--soft); font-weight: 500; padding: 3px 8px; text-align: right; white-space: nowrap; }
.waiting td { padding: 3px 8px; text-align: right; border: 1px solid var(--grid); min-width: 44px; } .waiting .sum { font-weight: 600; }
figcaption { font-weight: 600; font-size: 13.5px; margin-bottom: 8px; } figure img { max-width: 100%; border-radius: 4px; }
</style>
</head>
<body>
<main>
<h1>{{title}}</h1>
<p class="about">{{about}}</p>
<div class="tiles">{{tiles}}</div>
<h2>Doctor</h2>
<div class="doctor">{{doctor}}</div>
<h2>Plots</h2>
<div class="cards">
{{cards}}
</div>
{{plan}}
</main>
<script>
for (const plot of document.querySelectorAll(".plot")) {
  const series = JSON.parse(plot.dataset.series), svg = plot.querySelector("svg");
  const [low, high, left, right] = svg.dataset.x.split(",").map(Number);
  const cursor = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "line"));
  const tip = plot.parentNode.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
  cursor.setAttribute("class", "cursor"); cursor.setAttribute("y1", 12); cursor.setAttribute("y2", 194); cursor.style.display = "none";
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const at = low + ((event.clientX - box.left) * scale - left) / (right - left) * (high - low);
    const near = points => points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
    const step = near(series.flatMap(s => s.points))[0], x = left + (step - low) / (high - low) * (right - left);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.style.display = tip.style.display = "block";
    tip.textContent = plot.dataset.xName + " " + step + series.map(s => "\\n" + s.label + "  " + near(s.points)[1]).join("");
    const card = plot.parentNode.getBoundingClientRect(), wanted = event.clientX - card.left + 14;
    tip.style.left = Math.min(wanted, card.width - tip.offsetWidth - 6) + "px";
    tip.style.top = event.clientY - card.top + 12 + "px";
  });
  svg.addEventListener("mouseleave", () => { cursor.style.display = tip.style.display = "none"; });
}
</script>
</body>
</html>
"""
