import type { BlockCourse } from "../contract.ts"
import { usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { count } from "../numbers.ts"
import { Figure } from "../parts/Amount.tsx"
import { ALONE, heat } from "../parts/heat.ts"
import { Section } from "../parts/Section.tsx"
import { Waiting } from "../parts/Waiting.tsx"
import { Words } from "../parts/Words.tsx"
import { plural } from "../words.ts"

type Course = readonly (number | null)[]

/** What a transformer does over its training: do tokens collapse, which heads attend alike? */
export function AttentionPage() {
  const { source } = usePane()
  const loaded = useGet(source, "attention", {})
  const found = loaded.value
  return (
    <div class="narrow" data-testid="attention">
      <h1>Attention</h1>
      <p class="lead">
        What the transformer's tokens and heads do, with the weights that it had at some steps of
        its training{found && `, on ${plural(found.queries, "query", "queries")}`}.
      </p>
      <Waiting of={loaded} doing="Looking at the model over training" />
      {found && (
        <>
          <ul class="findings" data-testid="attention-findings">
            {found.findings.map((finding) => (
              <li>
                <Words text={finding} />
              </li>
            ))}
          </ul>
          <Section title="Tokens" twin={{ source, path: "attention", params: {} }}>
            <p class="small">
              μ/‖X‖ after each block: how far tokens lie from their mean, of their size. 0: all are
              one.
            </p>
            <Courses steps={found.steps} rows={tokens(found.blocks)} testid="tokens" />
          </Section>
          <Section title="Heads">
            <p class="small">
              How much each head's attention overlaps with that of the head of its block that is
              most like it. 1: both attend alike, and one pattern would do.
            </p>
            <Courses steps={found.steps} rows={overlaps(found.blocks)} testid="overlaps" />
          </Section>
          <Section title="Shares">
            <p class="small">
              The size of what each head adds, relative to what its layer gives. Near 0, it may be
              pruned.
            </p>
            <Courses steps={found.steps} rows={shares(found.blocks)} testid="shares" />
          </Section>
        </>
      )}
    </div>
  )
}

type Row = [string, Course]

const tokens = (blocks: BlockCourse[]): Row[] => blocks.map((one) => [one.name, one.relative])

const overlaps = (blocks: BlockCourse[]): Row[] =>
  blocks.flatMap(({ name, heads }) =>
    heads.map(({ head, twin, overlap }): Row => [
      `${name}, head ${head}${twin === null ? "" : ` (like ${twin})`}`,
      overlap,
    ]),
  )

const shares = (blocks: BlockCourse[]): Row[] =>
  blocks.flatMap(({ name, heads }) =>
    heads.map(({ head, share }): Row => [`${name}, head ${head}`, share]),
  )

/** A line for each course, a column for each step; the darker, the larger. */
function Courses({ steps, rows, testid }: { steps: number[]; rows: Row[]; testid: string }) {
  const largest = Math.max(0, ...rows.flatMap(([, course]) => course.map((one) => one ?? 0)))
  return (
    <div class="scrolls" tabIndex={0} role="region" aria-label={testid}>
      <table class="courses" data-testid={testid}>
        <thead>
          <tr>
            <th scope="col">Step</th>
            {steps.map((step) => (
              <th scope="col">{count(step)}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(([name, course]) => (
            <tr>
              <th scope="row">{name}</th>
              {course.map((value) => (
                <td style={heat(value ?? 0, largest, ALONE / 2)}>
                  <Figure value={value} text={value === null ? "–" : value.toFixed(2)} />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}
