import { useCallback } from "preact/hooks"
import type { EvidenceCard, EvidenceView, SideName } from "../contract.ts"
import { useExplorer, usePane } from "../context.ts"
import { usePages } from "../load.ts"
import { Scale } from "../numbers.ts"
import { paramsOf } from "../state.ts"
import { plural } from "../words.ts"
import { Card } from "./Card.tsx"
import { Sheet } from "./Sheet.tsx"
import { Virtual } from "./Virtual.tsx"
import { Failed } from "./Waiting.tsx"

const list = (answer: EvidenceView) => ({ total: answer.total, items: answer.samples })

/** Every sample of one side, strongest first. */
export function AllEvidence({ side }: { side: SideName }) {
  const { go } = useExplorer()
  const { asked, source } = usePane()
  const params = { ...paramsOf(asked), side }
  const pages = usePages<"evidence", EvidenceCard>(source, "evidence", params, list)
  const scale = new Scale([pages.item(0)?.value ?? 0])
  const range = useCallback((first: number, last: number) => pages.need(first, last), [pages.total])
  const labeled = asked.label === null ? "" : ` labeled ${asked.label}`
  return (
    <Sheet title={`All evidence ${side}`} onClose={() => go({ all: null })} testid="all">
      {pages.failed && <Failed message={pages.failed} />}
      <p class="small" role="status">
        {pages.total === null
          ? "Reading the list…"
          : `${plural(pages.total, "sample")}${labeled}, strongest first.`}
      </p>
      {pages.total !== null && (
        <Virtual
          total={pages.total}
          size={64}
          label={`Evidence ${side}, strongest first`}
          onRange={range}
          testid="all-list"
          item={(index) => {
            const evidence = pages.item(index)
            if (!evidence) return <span class="small">Reading sample {index + 1}…</span>
            return <Card evidence={evidence} scale={scale} row />
          }}
        />
      )}
    </Sheet>
  )
}
