import { useExplorer, usePane } from "../context.ts"
import { ActsSheet } from "./ActsSheet.tsx"
import { AllEvidence } from "./AllEvidence.tsx"

/** What was opened over the page, if it was opened in this pane. */
export function Opened() {
  const { state } = useExplorer()
  const { which } = usePane()
  if (state.pane !== which) return null
  return (
    <>
      {state.all && <AllEvidence side={state.all} />}
      {state.acting !== null && <ActsSheet id={state.acting} />}
    </>
  )
}
