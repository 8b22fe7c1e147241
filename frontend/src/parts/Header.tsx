import { useExplorer } from "../context.ts"
import { toRun } from "../moves.ts"
import type { Page, Theme } from "../state.ts"
import { Go } from "./Go.tsx"

const PAGES: [Page, string][] = [
  ["query", "Predictions"],
  ["suspects", "Suspects"],
  ["compare", "Compare"],
  ["attention", "Attention"],
  ["books", "Books"],
]
const NEXT: Record<Theme, Theme> = { auto: "dark", dark: "light", light: "auto" }
const CLOSED = { acting: null, all: null }

export function Header() {
  const { state, runs, go } = useExplorer()
  const run = runs[state.asked.run] ?? runs[0]
  const openCompare = {
    other: runs.length > 1 ? toRun(state.asked, state.asked.run ? 0 : 1) : state.asked,
  }
  return (
    <header class="header">
      <p class="brand">
        <span>dualform</span> <b data-testid="run">{run?.name}</b>
      </p>
      <nav aria-label="Pages">
        {PAGES.filter(([page]) => page !== "attention" || run?.attention).map(([page, title]) => (
          <Go
            to={{
              page,
              ...CLOSED,
              ...(page === "compare" && state.page !== page ? openCompare : {}),
            }}
            current={state.page === page}
            testid={`page-${page}`}
          >
            {title}
          </Go>
        ))}
      </nav>
      <button
        type="button"
        class="quiet theme"
        onClick={() => go({ theme: NEXT[state.theme] }, true)}
        data-testid="theme"
      >
        Colors: {state.theme}
      </button>
    </header>
  )
}
