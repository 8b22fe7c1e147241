// What every part of the page may ask for: the choices, the runs, and the pane it stands in.
import { createContext } from "preact"
import { useContext } from "preact/hooks"
import type { RunView } from "./contract.ts"
import type { Source } from "./source/source.ts"
import type { Asked, State, Which } from "./state.ts"

export interface Explorer {
  state: State
  go(patch: Partial<State>, replace?: boolean): void
  link(patch: Partial<State>): string
  sources: readonly Source[]
  runs: readonly RunView[]
  /** The first query of each run; empty if there is none. */
  firsts: readonly string[]
}

/** One question and the run it is asked of; a comparison has two. */
export interface Pane {
  which: Which
  asked: Asked
  ask(asked: Asked, replace?: boolean): void
  source: Source
  run: RunView
}

export const ExplorerContext = createContext<Explorer | null>(null)
export const PaneContext = createContext<Pane | null>(null)

/** The pane that the state describes, if there is a run for it. */
export function paneOf(explorer: Explorer, which: Which): Pane | null {
  const chosen = explorer.state[which]
  const asked = { ...chosen, query: chosen.query || (explorer.firsts[chosen.run] ?? "") }
  const source = explorer.sources[asked.run]
  const run = explorer.runs[asked.run]
  if (!source || !run) return null
  const ask = (next: Asked, replace?: boolean) => explorer.go({ [which]: next }, replace)
  return { which, asked, source, run, ask }
}

export function useExplorer(): Explorer {
  return given(useContext(ExplorerContext))
}

export function usePane(): Pane {
  return given(useContext(PaneContext))
}

function given<T>(value: T | null): T {
  if (value === null) throw new Error("This part stands outside of an explorer.")
  return value
}
