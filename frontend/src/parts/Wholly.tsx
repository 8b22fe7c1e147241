import { usePane } from "../context.ts"
import { wholly } from "../moves.ts"
import { paramsOf, toHash, START } from "../state.ts"
import { Go } from "./Go.tsx"

/** The way out of a question without an answer: the same query, asked in the usual way. */
export function Wholly() {
  const { asked, source, which } = usePane()
  const usual = { ...wholly(asked), ask: "layer" as const, layer: null }
  const same = toHash({ ...START, asked }) === toHash({ ...START, asked: usual })
  if (same || !source.carries("answer", paramsOf(usual))) return null
  return (
    <p class="notice">
      <Go to={{ [which]: usual }} testid="wholly">
        Show what is known of this query
      </Go>
    </p>
  )
}
