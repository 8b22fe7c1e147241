import type { ActsView } from "../contract.ts"
import { useExplorer, usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { Scale } from "../numbers.ts"
import { paramsOf } from "../state.ts"
import { placeName, sampleName } from "../words.ts"
import { Amount } from "./Amount.tsx"
import { Tick } from "./Card.tsx"
import { Go } from "./Go.tsx"
import { Sheet } from "./Sheet.tsx"
import { Stage } from "./Stage.tsx"
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
      {source.carries("sample", { id }) && (
        <p class="links">
          <Go
            to={{ ...state, page: "sample", sample: id, acting: null, all: null }}
            testid="to-sample"
          >
            Its own page
          </Go>
        </p>
      )}
    </Sheet>
  )
}

function Where({ acts }: { acts: ActsView }) {
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
            <Tick id={String(acts.id)} name={name} /> Subtract it
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

/** The sample and its positions; choosing one keeps only the evidence from there. */
function ActingPicture({ acts }: { acts: ActsView }) {
  const { go } = useExplorer()
  const { asked, which } = usePane()
  const places = acts.places && acts.places.length > 1 ? acts.places : null
  const most = places ? places.indexOf(Math.max(...places)) : 0
  return (
    <div>
      <Stage
        preview={acts.preview}
        name={sampleName(acts.id, acts.label)}
        amounts={places}
        chosen={asked.at}
        onChoose={(at) => go({ [which]: { ...asked, at }, acting: null })}
        label="Positions of the sample: choose one to see only evidence from there"
        tokens={acts.tokens}
        grid={acts.grid}
        testid="acts-places"
      />
      {places && (
        <p class="small">
          It acts most at {acts.tokens?.[most]?.trim() || placeName(most, acts.grid)}. Choose a
          position to keep only the evidence from there, in all samples.
        </p>
      )}
    </div>
  )
}
