import type { ComponentChildren } from "preact"
import {
  useEffect,
  useErrorBoundary,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "preact/hooks"
import type { RunView } from "./contract.ts"
import { ExplorerContext, paneOf, PaneContext, useExplorer } from "./context.ts"
import { useFocusKept } from "./focus.ts"
import { sentence } from "./load.ts"
import { count } from "./numbers.ts"
import { Header } from "./parts/Header.tsx"
import { Tray } from "./parts/Tray.tsx"
import { Failed } from "./parts/Waiting.tsx"
import { AttentionPage } from "./pages/AttentionPage.tsx"
import { BooksPage } from "./pages/BooksPage.tsx"
import { ComparePage } from "./pages/ComparePage.tsx"
import { QueryPage } from "./pages/QueryPage.tsx"
import { SamplePage } from "./pages/SamplePage.tsx"
import { SuspectsPage } from "./pages/SuspectsPage.tsx"
import type { Route } from "./route.ts"
import type { Source } from "./source/source.ts"
import type { State } from "./state.ts"
import { plural } from "./words.ts"

interface Props {
  route: Route
  /** The source of a run, by its number. */
  open(run: number): Source
  onState?(state: State): void
}

const FAULT = "The page has a fault and cannot show this. Go back, or open it anew without its #."

/** The whole explorer: first the facts of its runs, then the page that the state names. */
export function App({ route, open, onState }: Props) {
  const [broken] = useErrorBoundary()
  const [, redraw] = useReducer((n: number) => n + 1, 0)
  const { runs, firsts, sources, failed } = useRuns(open)
  const { state } = route
  useEffect(() => route.listen(() => redraw(0)), [route])
  useLayoutEffect(() => onState?.(state))
  if (failed !== null) return <Failed message={failed} />
  if (broken) return <Failed message={`${FAULT} (${sentence(broken)})`} />
  if (!runs) return <Opening />
  const explorer = {
    state,
    sources,
    runs,
    firsts,
    go: (patch: Partial<State>, replace?: boolean) => route.go(patch, replace),
    link: (patch: Partial<State>) => route.link(patch),
  }
  return (
    <ExplorerContext.Provider value={explorer}>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the evidence
      </a>
      <Header />
      <Main />
      <Footer />
    </ExplorerContext.Provider>
  )
}

function Main() {
  const main = useRef<HTMLElement>(null)
  useFocusKept(main)
  return (
    <main id="main" tabIndex={-1} ref={main}>
      <MainPane>
        <CurrentPage />
        <Tray />
      </MainPane>
    </main>
  )
}

/** The URL's # holds the state, so the focus is moved by hand. */
function skip(event: MouseEvent): void {
  event.preventDefault()
  const link = event.currentTarget as HTMLElement
  link.parentElement?.querySelector<HTMLElement>("main")?.focus()
}

function Opening() {
  return (
    <p class="notice opening" role="status">
      Opening the run…
    </p>
  )
}

function useRuns(open: (run: number) => Source) {
  const sources = useMemo(() => [open(0)], [open])
  const [runs, setRuns] = useState<RunView[] | null>(null)
  const [firsts, setFirsts] = useState<string[]>([])
  const [failed, setFailed] = useState<string | null>(null)
  useEffect(() => {
    const load = async () => {
      const [first, query] = await facts(sources[0]!)
      for (let run = 1; run < (first.runs ?? 1); run++) sources.push(open(run))
      const others = await Promise.all(sources.slice(1).map(facts))
      setFirsts([query, ...others.map(([, name]) => name)])
      setRuns([first, ...others.map(([run]) => run)])
    }
    load().catch((error: unknown) => setFailed(sentence(error)))
  }, [sources])
  return { runs, firsts, sources, failed }
}

/** A run, and its first query. */
async function facts(source: Source): Promise<[RunView, string]> {
  const [run, { queries }] = await Promise.all([
    source.get("run", {}),
    source.get("queries", { limit: 1 }),
  ])
  return [run, queries[0]?.query ?? ""]
}

/** The pane of every page but the comparison. */
function MainPane({ children }: { children: ComponentChildren }) {
  const explorer = useExplorer()
  const pane = paneOf(explorer, "asked")
  const { run } = explorer.state.asked
  if (!pane)
    return (
      <Failed message={`There is no run number ${run} here; there are ${explorer.runs.length}.`} />
    )
  return <PaneContext.Provider value={pane}>{children}</PaneContext.Provider>
}

function CurrentPage() {
  const { state } = useExplorer()
  if (state.page === "compare") return <ComparePage />
  if (state.page === "suspects") return <SuspectsPage />
  if (state.page === "books") return <BooksPage />
  if (state.page === "attention") return <AttentionPage />
  if (state.page === "sample" && state.sample !== null) return <SamplePage id={state.sample} />
  return <QueryPage />
}

function Footer() {
  const { runs } = useExplorer()
  return (
    <footer class="footer small">
      {runs.map((run) => (
        <p>
          {run.name}: {plural(run.samples, "sample")}, {count(run.steps)} steps,{" "}
          {plural(run.layers.length, "layer")}.
          {run.carried && " This page is a report: it carries its answers and asks nobody."}
        </p>
      ))}
    </footer>
  )
}
