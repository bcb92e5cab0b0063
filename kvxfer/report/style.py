"""How a report's page looks: on a screen, on a phone, on paper, by day and by night."""

from __future__ import annotations

CSS = """\
:root { color-scheme: light dark; --ink: #1f2933; --muted: #5f6c7b; --line: #d9dee4; --page: #ffffff; --tint: #f5f7f9;
  --strong: #1d6fb8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ed; --muted: #9aa7b4; --line: #36404a; --page: #14191e; --tint: #1c2329; --strong: #7db8ea; }
  img { filter: brightness(.9); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; overflow-wrap: break-word; }
p, li { max-width: 46rem; }
h1, h2, h3, h4 { line-height: 1.25; margin: 2em 0 .6em; }
h1 { font-size: 1.75rem; margin-top: .5em; }
h2 { font-size: 1.15rem; margin: 0; display: inline; }
details { border-top: 1px solid var(--line); }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { padding: .7rem 0; cursor: pointer; }
summary:hover h2 { color: var(--strong); }
details > div { padding-bottom: 1.5rem; }
h3 { font-size: 1.08rem; }
h4 { font-size: 1rem; }
.first { margin-bottom: 2rem; }
.first ul { padding-left: 1.2rem; margin-top: 0; }
.first > p:first-child { border-left: 4px solid var(--strong); background: var(--tint); padding: .8rem 1rem;
  margin: 0 0 1.2rem; }
.first > p:first-child strong { font-weight: 600; }
.first > p:has(img) { margin: 0; max-width: none; }
@media (min-width: 60rem) {
  .first:has(img) { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); column-gap: 2rem; }
  .first > p:has(img) { grid-column: 2; grid-row: 1 / span 20; }
  .first > .wide { grid-column: 1 / -1; grid-row: 21; }
}
a[href] { color: var(--strong); }
code { background: var(--tint); border: 1px solid var(--line); border-radius: 3px; padding: 0 .25em; font-size: .9em; }
pre { background: var(--tint); border: 1px solid var(--line); padding: .8rem; overflow-x: auto; }
pre code { background: none; border: 0; padding: 0; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; text-align: left;
  white-space: nowrap; }
td { max-width: 30rem; }
th { color: var(--muted); font-weight: 600; border-bottom-width: 2px; white-space: normal; vertical-align: bottom;
  min-width: 5.4em; }
td:first-child, th:first-child { padding-left: 0; }
tbody tr:hover { background: var(--tint); }
td.said { white-space: normal; min-width: 16rem; }
img { display: block; max-width: 100%; height: auto; margin: 0 0 .3rem; background: #fff; border-radius: 4px; }
.caption { display: block; color: var(--muted); font-size: .875rem; margin-bottom: 1.2rem; }
hr { border: 0; border-top: 1px solid var(--line); margin: 2.5rem 0; }
@media (max-width: 40rem) {
  main { padding: 1rem .9rem 3rem; }
  h1 { font-size: 1.4rem; }
  table { font-size: .8rem; }
  th { min-width: 0; }
  td:first-child { white-space: normal; min-width: 7.5rem; }
  td.said { min-width: 9.5rem; }
}
@media print {
  details::details-content { content-visibility: visible; height: auto; }
  :root { --ink: #000; --muted: #444; --line: #bbb; --page: #fff; --tint: #fff; --strong: #000; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .wide { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .25rem .4rem; white-space: normal; }
  h2, h3, h4 { break-after: avoid; }
  img, tr { break-inside: avoid; }
}
"""
