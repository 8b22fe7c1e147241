import { usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { paramsOf } from "../state.ts"
import { Scale } from "../numbers.ts"
import { Check } from "../parts/Check.tsx"
import { EvidenceSides } from "../parts/EvidenceSides.tsx"
import { Filters } from "../parts/Filters.tsx"
import { Gallery } from "../parts/Gallery.tsx"
import { Groups } from "../parts/Groups.tsx"
import { Layers } from "../parts/Layers.tsx"
import { Opened } from "../parts/Opened.tsx"
import { Outputs } from "../parts/Outputs.tsx"
import { QueryFigure, Verdict } from "../parts/QueryFigure.tsx"
import { Questions } from "../parts/Questions.tsx"
import { Through } from "../parts/Through.tsx"
import { Waiting } from "../parts/Waiting.tsx"
import { When } from "../parts/When.tsx"
import { Wholly } from "../parts/Wholly.tsx"
import { Words } from "../parts/Words.tsx"

const NOTHING_GIVEN =
  "There is no prediction to show yet: give one above, or open a sample from the suspects."
const NOTHING_COMMITTED =
  "No step of this run is committed yet. While it is recorded, `recorder.checkpoint()` commits all steps so far; then open it again."

/** A prediction, and what it is made of. */
export function QueryPage() {
  const { asked, run, source } = usePane()
  const nothing = asked.query === ""
  const loaded = useGet(source, nothing ? null : "answer", paramsOf(asked))
  const answer = loaded.value
  return (
    <>
      <Gallery />
      <Waiting of={loaded} doing="Reading the evidence" />
      {loaded.failed !== null && <Wholly />}
      {nothing && (
        <p class="notice">
          <Words text={run.steps ? NOTHING_GIVEN : NOTHING_COMMITTED} />
        </p>
      )}
      {answer && loaded.failed === null && (
        <div class={`prediction ${loaded.busy ? "stale" : ""}`} aria-busy={loaded.busy}>
          <aside class="query" aria-label="The query">
            <h1 data-testid="title">{answer.query.title}</h1>
            <Verdict answer={answer} />
            <QueryFigure answer={answer} />
            <h2>Outputs</h2>
            <p class="small">Choose the one that the evidence is about.</p>
            <Outputs answer={answer} />
          </aside>
          <div class="answer">
            <Questions answer={answer} />
            <Through />
            <Check answer={answer} />
            <Filters />
            <EvidenceSides answer={answer} />
            <div class="pair">
              <When answer={answer} />
              <Layers answer={answer} />
            </div>
            <Groups answer={answer} />
          </div>
          <p class="hidden" role="status" data-testid="live">
            {loaded.busy ? "" : announce(answer)}
          </p>
        </div>
      )}
      <Opened />
    </>
  )
}

type Announced = Parameters<typeof Check>[0]["answer"]

function announce({ asked, sides }: Announced): string {
  const scale = new Scale([sides.for.sum, sides.against.sum])
  const both = `${scale.signed(sides.for.sum)} for and ${scale.signed(sides.against.sum)} against`
  return `The evidence about ${asked}: ${both}.`
}
