import type { GroupView } from "../contract.ts"
import { Scale } from "../numbers.ts"

/** Each label's contributions, sorted, as an area; side by side and to one scale. */
export function SortedAreas({ groups }: { groups: GroupView[] }) {
  const all = groups.flatMap((group) => group.curve)
  const high = Math.max(0, ...all)
  const low = Math.min(0, ...all)
  const scale = new Scale(all)
  return (
    <figure class="areas" data-testid="areas">
      <div class="row">
        {groups.map((group) => (
          <div class="one">
            <Area group={group} high={high} low={low} />
            <span class="small" aria-hidden="true">
              {group.label === null ? "all" : String(group.label)}
            </span>
          </div>
        ))}
      </div>
      <figcaption class="small">
        Each label's samples from the strongest for to the strongest against, between{" "}
        {scale.signed(high)} and {scale.signed(low)}.
      </figcaption>
    </figure>
  )
}

interface Props {
  group: GroupView
  high: number
  low: number
}

function Area({ group, high, low }: Props) {
  const range = high - low || 1
  const y = (value: number) => (100 * (high - value)) / range
  const outline = (keep: (value: number) => number) => path(group.curve.map(keep).map(y), y(0))
  const name = group.label === null ? "All samples" : `Label ${group.label}`
  const scale = new Scale(group.curve)
  const ends = `${scale.signed(group.curve[0] ?? 0)} to ${scale.signed(group.curve.at(-1) ?? 0)}`
  return (
    <svg
      viewBox="0 0 100 100"
      preserveAspectRatio="none"
      role="img"
      aria-label={`${name}: ${ends}`}
    >
      <path class="for" d={outline((value) => Math.max(0, value))} />
      <path class="against" d={outline((value) => Math.min(0, value))} />
      <line class="zero" x1={0} x2={100} y1={y(0)} y2={y(0)} />
    </svg>
  )
}

/** A step for each point, so that one sample is as visible as many. */
function path(heights: number[], zero: number): string {
  const width = 100 / Math.max(1, heights.length)
  const steps = heights.map(
    (y, i) => `L${(i * width).toFixed(2)} ${y.toFixed(2)}h${width.toFixed(2)}`,
  )
  return `M0 ${zero.toFixed(2)}${steps.join("")}L100 ${zero.toFixed(2)}Z`
}
