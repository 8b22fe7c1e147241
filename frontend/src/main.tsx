// A page: of a server, or a report that carries its own answers.
import type { ReportData } from "./contract.ts"
import { mount } from "./mount.tsx"
import { Route, urlHome } from "./route.ts"
import { ReportSource } from "./source/report.ts"
import { HttpSource } from "./source/http.ts"

function start(): void {
  const element = document.getElementById("app")
  if (!element) return
  document.documentElement.classList.add("dualform-page")
  const carried = document.getElementById("carried")?.textContent
  const own = carried ? new ReportSource(JSON.parse(carried) as ReportData) : null
  const open = (run: number) => own ?? new HttpSource(`api/${run}`)
  const onState = ({ theme }: { theme: string }) => {
    document.documentElement.dataset.theme = theme
  }
  mount(element, { route: new Route(urlHome), open, onState })
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start)
else start()
