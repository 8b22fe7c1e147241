import type { ComponentChildren } from "preact"
import { useCallback } from "preact/hooks"
import type { EvidenceCard, SuspectsView } from "../contract.ts"
import { usePane } from "../context.ts"
import { usePages } from "../load.ts"
import { count, Scale } from "../numbers.ts"
import { Figure } from "../parts/Amount.tsx"
import { Tick } from "../parts/Card.tsx"
import { Go } from "../parts/Go.tsx"
import { Picture } from "../parts/Picture.tsx"
import { Save } from "../parts/Save.tsx"
import { Virtual } from "../parts/Virtual.tsx"
import { Failed } from "../parts/Waiting.tsx"
import { brief, plural, sampleName } from "../words.ts"

const list = (answer: SuspectsView) => ({ total: answer.total, items: answer.samples })

/** Samples that look mislabeled, most suspicious first. */
export function SuspectsPage() {
  const { source } = usePane()
  const pages = usePages<"suspects", EvidenceCard>(source, "suspects", {}, list)
  const range = useCallback((first: number, last: number) => pages.need(first, last), [pages.total])
  const scale = new Scale([pages.item(0)?.value ?? 0])
  const twin = source.link("suspects", {})
  return (
    <div class="narrow" data-testid="suspects">
      <h1>Suspects</h1>
      <p class="lead">
        Training samples whose errors stayed large: the model had to be forced to believe their
        labels.
      </p>
      {pages.failed && <Failed message={pages.failed} />}
      <p class="links" role="status">
        {pages.total !== null && `${plural(pages.total, "sample")}. `}
        {pages.total === null && !pages.failed && "Reading the list…"}
        {!pages.failed && <Save />}
        {twin && (
          <a
            class="twin"
            href={twin}
            target="_blank"
            rel="noreferrer"
            aria-label="Suspects as JSON"
          >
            JSON
          </a>
        )}
      </p>
      {pages.total ? (
        <Virtual
          total={pages.total}
          size={64}
          label="Suspects, most suspicious first"
          onRange={range}
          testid="suspect-list"
          item={(index) => <Row index={index} sample={pages.item(index)} scale={scale} />}
        />
      ) : null}
    </div>
  )
}

/** In place of a link to a page that is not carried. */
function Still({ class: style, children }: { class: string; children: ComponentChildren }) {
  return <span class={style}>{children}</span>
}

interface RowProps {
  index: number
  sample: EvidenceCard | undefined
  scale: Scale
}

function Row({ index, sample, scale }: RowProps) {
  const { source } = usePane()
  if (!sample) return <span class="small">Reading sample {index + 1}…</span>
  const { id, label, value, preview } = sample
  const Open = source.carries("sample", { id }) ? Go : Still
  return (
    <article class="card row" data-testid={`suspect-${id}`}>
      <Open class="open" to={{ page: "sample", sample: String(id) }}>
        <span class="small rank">{count(index + 1)}</span>
        <Picture preview={preview} />
        <span class="caption">
          <span class="name" title={String(id)}>
            Sample {brief(id)}
          </span>
          {label !== null && <span class="label">{String(label)}</span>}
        </span>
        <span class="bar plain" aria-hidden="true">
          <span style={{ width: `${100 * Math.max(0, scale.share(value))}%` }} />
        </span>
        <Figure value={value} text={scale.plain(value)} />
      </Open>
      <Tick id={String(id)} name={sampleName(id, label)} />
    </article>
  )
}
