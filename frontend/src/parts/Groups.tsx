import type { AnswerView, GroupView, Id } from "../contract.ts"
import { usePane } from "../context.ts"
import { count, Scale } from "../numbers.ts"
import { paramsOf } from "../state.ts"
import { plural } from "../words.ts"
import { Amount, Bar } from "./Amount.tsx"
import { Section } from "./Section.tsx"
import { SortedAreas } from "./SortedAreas.tsx"

const MOST = 24

/** Sums by label, and each label's contributions sorted: the figure of Irie, Csordás and Schmidhuber. */
export function Groups({ answer }: { answer: AnswerView }) {
  const { asked, source } = usePane()
  if (answer.groups.length === 0) return null
  const shown = strongest(answer.groups)
  const left = answer.groups.length - shown.length
  return (
    <Section
      title={`By ${asked.by ?? "label"}`}
      testid="groups"
      twin={{ source, path: "answer", params: paramsOf(asked) }}
    >
      <Columns />
      <div class="groups">
        <SortedAreas groups={shown} />
        <Sums groups={shown} />
      </div>
      {left > 0 && <p class="small">{plural(left, "more label")} with smaller sums.</p>}
    </Section>
  )
}

/** What the samples are grouped by, where more is known of them than a label. */
function Columns() {
  const { asked, ask, run, source } = usePane()
  if (run.columns.length < 2) return null
  const by = (name: string) => ({ ...asked, by: name === "label" ? null : name, label: null })
  return (
    <label class="small">
      Grouped by{" "}
      <select
        value={asked.by ?? "label"}
        onChange={(event) => ask(by(event.currentTarget.value))}
        data-testid="group-by"
      >
        {run.columns.map((name) => (
          <option value={name} disabled={!source.carries("answer", paramsOf(by(name)))}>
            {name}
          </option>
        ))}
      </select>
    </label>
  )
}

/** The labels of the largest sums, in the order in which they came. */
function strongest(groups: GroupView[]): GroupView[] {
  const sizes = groups.map((group) => Math.abs(group.sum)).sort((a, b) => b - a)
  const least = sizes[MOST - 1] ?? 0
  return groups.filter((group) => Math.abs(group.sum) >= least).slice(0, MOST)
}

function Sums({ groups }: { groups: GroupView[] }) {
  const scale = new Scale(groups.map((group) => group.sum))
  return (
    <table class="sums">
      <caption class="hidden">Sums of the evidence by label</caption>
      <thead class="hidden">
        <tr>
          <th>Label</th>
          <th>Samples</th>
          <th>Bar</th>
          <th>Sum</th>
        </tr>
      </thead>
      <tbody>
        {groups.map((group) => (
          <tr key={String(group.label)}>
            <th scope="row">
              <LabelButton label={group.label} />
            </th>
            <td class="small">{count(group.count)}</td>
            <td class="wide">
              <Bar share={scale.share(group.sum)} />
            </td>
            <td>
              <Amount value={group.sum} scale={scale} testid={`group-${group.label}`} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  )
}

/** Restricts the evidence to a label, or lifts that. */
function LabelButton({ label }: { label: Id | null }) {
  const { asked, ask, source } = usePane()
  if (label === null) return <>all</>
  const chosen = asked.label === String(label)
  const next = { ...asked, label: chosen ? null : String(label) }
  return (
    <button
      type="button"
      class="quiet"
      aria-pressed={chosen}
      title={String(label)}
      aria-label={`Only evidence ${asked.by ?? "labeled"} ${label}`}
      disabled={!source.carries("answer", paramsOf(next))}
      onClick={() => ask(next)}
      data-testid={`label-${label}`}
    >
      {String(label)}
    </button>
  )
}
