import type { Acts } from "../api.ts"
import { useExplorer, usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { Scale } from "../numbers.ts"
import { paramsOf } from "../state.ts"
import { placeName, sampleName } from "../words.ts"
import { Amount } from "./Amount.tsx"
import { Tick } from "./Card.tsx"
import { Go } from "./Go.tsx"
import { Picture } from "./Picture.tsx"
import { Places } from "./Places.tsx"
import { Sheet } from "./Sheet.tsx"
import { Timeline } from "./Timeline.tsx"
import { Waiting } from "./Waiting.tsx"

/** Where in a training sample, and when in training, its evidence comes from. */
export function ActsSheet({ id }: { id: string }) {
  const { go, state } = useExplorer()
  const { asked, source } = usePane()
  const loaded = useGet(source, "acts", { ...paramsOf(asked), label: null, id })
  const acts = loaded.value
  return (
    <Sheet title={`Sample ${id}`} onClose={() => go({ acting: null })} testid="acts">
      <Waiting of={loaded} doing={`Reading sample ${id}`} />
      {acts && String(acts.id) === id && <Where acts={acts} />}
      <p class="links">
        <Go
          to={{ ...state, page: "sample", sample: id, acting: null, all: null }}
          testid="to-sample"
        >
          Its own page
        </Go>
      </p>
    </Sheet>
  )
}

function Where({ acts }: { acts: Acts }) {
  const { run } = usePane()
  const name = sampleName(acts.id, acts.label)
  return (
    <>
      <div class="acting">
        <ActingPicture acts={acts} />
        <div>
          <p class="lead">
            <Amount value={acts.value} scale={new Scale([acts.value])} testid="acts-value" />
          </p>
          <p>
            {acts.label === null ? "It has no label." : <>Its label is {String(acts.label)}.</>}
          </p>
          <p class="ticking">
            <Tick id={String(acts.id)} name={name} /> Forget it
          </p>
        </div>
      </div>
      {acts.timeline && (
        <>
          <h3>When it acts</h3>
          <Timeline
            values={acts.timeline}
            bins={run.bins}
            label={`What ${name} adds over training`}
            testid="acts-timeline"
          />
        </>
      )}
    </>
  )
}

/** The sample with its positions over it, where the layer has positions. */
function ActingPicture({ acts }: { acts: Acts }) {
  const { asked, ask } = usePane()
  const { go } = useExplorer()
  const picture = <Picture preview={acts.preview} name={sampleName(acts.id, acts.label)} />
  if (!acts.places || acts.places.length < 2) return <div class="stage">{picture}</div>
  const choose = (at: number) => {
    ask({ ...asked, at })
    go({ acting: null }, true)
  }
  const largest = acts.places.indexOf(Math.max(...acts.places))
  return (
    <div class="stage">
      {!acts.tokens && picture}
      <Places
        amounts={acts.places}
        chosen={asked.at}
        onChoose={choose}
        label="Positions of the sample: choose one to see only evidence from there"
        tokens={acts.tokens}
        grid={acts.grid}
        testid="acts-places"
      />
      <p class="small">
        It acts most at {acts.tokens?.[largest]?.trim() || placeName(largest, acts.grid)}. Choose a
        position to keep only the evidence from there, in all samples.
      </p>
    </div>
  )
}
