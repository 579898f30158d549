"""Style sheet (CSS) of ``report.html``, the page that ``ft report`` writes about a run."""

CSS = """\
:root { --ink: #1f2933; --quiet: #66717d; --faint: #dfe4ea; --paper: #fff; --ground: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { margin: 0; font-size: 26px; overflow-wrap: anywhere; }
h2 { margin: 0 0 12px; font-size: 17px; }
header p { margin: 2px 0 18px; color: var(--quiet); }
section { background: var(--paper); border: 1px solid var(--faint); border-radius: 8px; }
section { padding: 18px 20px; margin: 0 0 18px; }
section.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px; }
section.cards { background: none; border: 0; padding: 0; }
.cards div { background: var(--paper); border: 1px solid var(--faint); border-radius: 8px; padding: 14px 16px; }
.cards b { display: block; font-size: 26px; line-height: 1.2; }
.cards span { display: block; }
small, .cards small { color: var(--quiet); font-size: 12.5px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 7px 10px 7px 0; border-bottom: 1px solid var(--faint); }
th { color: var(--quiet); font-weight: 500; }
td { overflow-wrap: anywhere; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
table.recoveries { min-width: 940px; }
table.recoveries td:nth-child(2) { width: 36%; }
table.recoveries td:nth-child(6) { width: 30%; }
table.recoveries td:last-child { white-space: nowrap; font-weight: 600; }
.wide { overflow-x: auto; }
.tag { color: #fff; border-radius: 4px; padding: 1px 8px; font-size: 12.5px; white-space: nowrap; }
.bar { display: flex; height: 14px; margin: 4px 0 2px; background: var(--ground); border-radius: 3px; }
.bar i { display: block; min-width: 1px; }
.key span { margin-right: 16px; color: var(--quiet); font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.events td { font: 12.5px/1.5 ui-monospace, monospace; }
.events td:first-child { white-space: nowrap; }
code { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
img, svg { display: block; width: 100%; height: auto; }
summary { cursor: pointer; color: var(--quiet); }
"""
