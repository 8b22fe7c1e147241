import { useRef, useState } from "preact/hooks"
import type { RunView } from "../contract.ts"
import { Scale } from "../numbers.ts"
import type { Span } from "../state.ts"
import { binName, spanName } from "../words.ts"
import { spoken } from "./Amount.tsx"

interface Props {
  values: number[]
  bins: RunView["bins"]
  label: string
  span?: Span | null
  /** Without it the figure is only looked at. */
  onSpan?(span: Span | null): void
  testid?: string
}

/** What was learned (up) and unlearned (down) in each bin, with a brush that chooses a span of them. */
export function Timeline({ values, bins, label, span = null, onSpan, testid }: Props) {
  const scale = new Scale(values)
  const last = values.length - 1
  return (
    <figure class="timeline" data-testid={testid}>
      <div class="plot">
        <Bars values={values} label={describe(values, bins, label, scale)} bins={bins} />
        {onSpan && <Brush count={values.length} bins={bins} span={span} onSpan={onSpan} />}
      </div>
      <div class="axis small" aria-hidden="true">
        <span>{binName(bins, 0)}</span>
        {last > 1 && <span>{binName(bins, Math.floor(last / 2))}</span>}
        {last > 0 && <span>{binName(bins, last)}</span>}
      </div>
    </figure>
  )
}

function describe(values: number[], bins: Props["bins"], label: string, scale: Scale): string {
  const most = values.indexOf(Math.max(...values))
  const least = values.indexOf(Math.min(...values))
  const say = (bin: number) => `${spoken(scale, values[bin] ?? 0)} in ${binName(bins, bin)}`
  return `${label}: at most ${say(most)}, at least ${say(least)}.`
}

/** Stretched to the width there is: bars have no text that stretching could harm. */
function Bars({ values, label, bins }: { values: number[]; label: string; bins: Props["bins"] }) {
  const scale = new Scale(values)
  const high = Math.max(0, ...values)
  const range = high - Math.min(0, ...values) || 1
  const gap = values.length > 80 ? 0 : 0.12
  return (
    <svg
      viewBox={`0 0 ${values.length} 100`}
      preserveAspectRatio="none"
      role="img"
      aria-label={label}
    >
      {values.map((value, bin) => (
        <rect
          class={value < 0 ? "against" : "for"}
          x={bin + gap / 2}
          width={1 - gap}
          y={(100 * (high - Math.max(0, value))) / range}
          height={(100 * Math.abs(value)) / range}
        >
          <title>{`${binName(bins, bin)}: ${scale.signed(value)}`}</title>
        </rect>
      ))}
      <line
        class="zero"
        x1={0}
        x2={values.length}
        y1={(100 * high) / range}
        y2={(100 * high) / range}
      />
    </svg>
  )
}

interface BrushProps {
  count: number
  bins: Props["bins"]
  span: Span | null
  onSpan(span: Span | null): void
}

/** Dragged by mouse or finger, or moved by the arrow keys at either end. */
function Brush({ count, bins, span, onSpan }: BrushProps) {
  const box = useRef<HTMLDivElement>(null)
  const [drag, setDrag] = useState<{ from: number; to: number } | null>(null)
  const shown = drag ? ordered(drag.from, drag.to) : (span ?? [0, count - 1])
  const [first, last] = clamp(shown, count)

  const binAt = (event: PointerEvent) => {
    const { left, width } = box.current!.getBoundingClientRect()
    const bin = Math.floor((count * (event.clientX - left)) / width)
    return Math.max(0, Math.min(count - 1, bin))
  }
  const settle = (next: Span) => onSpan(next[0] === 0 && next[1] === count - 1 ? null : next)
  const down = (event: PointerEvent) => {
    if (event.button) return
    box.current!.setPointerCapture(event.pointerId)
    setDrag({ from: binAt(event), to: binAt(event) })
  }
  const up = () => {
    if (drag) settle(ordered(drag.from, drag.to))
    setDrag(null)
  }
  return (
    <div
      class="brush"
      ref={box}
      onPointerDown={down}
      onPointerMove={(event) => drag && setDrag({ ...drag, to: binAt(event) })}
      onPointerUp={up}
      onPointerCancel={() => setDrag(null)}
      data-testid="brush"
    >
      <div class="veil" style={{ left: "0", width: `${(100 * first) / count}%` }} />
      <div class="veil" style={{ left: `${(100 * (last + 1)) / count}%`, right: "0" }} />
      <Handle
        name="Beginning of the span"
        at={(100 * first) / count}
        range={[0, last]}
        value={first}
        text={spanName(bins, [first, last])}
        onMove={(bin) => settle([bin, last])}
      />
      <Handle
        name="End of the span"
        at={(100 * (last + 1)) / count}
        range={[first, count - 1]}
        value={last}
        text={spanName(bins, [first, last])}
        onMove={(bin) => settle([first, bin])}
      />
    </div>
  )
}

interface HandleProps {
  name: string
  at: number
  range: Span
  value: number
  text: string
  onMove(bin: number): void
}

function Handle({ name, at, range, value, text, onMove }: HandleProps) {
  const moves: Record<string, number> = {
    ArrowLeft: value - 1,
    ArrowDown: value - 1,
    ArrowRight: value + 1,
    ArrowUp: value + 1,
    PageDown: value - 5,
    PageUp: value + 5,
    Home: range[0],
    End: range[1],
  }
  const press = (event: KeyboardEvent) => {
    const to = moves[event.key]
    if (to === undefined) return
    event.preventDefault()
    onMove(Math.max(range[0], Math.min(range[1], to)))
  }
  return (
    <div
      class="handle"
      style={{ left: `${at}%` }}
      role="slider"
      tabIndex={0}
      aria-label={name}
      aria-valuemin={range[0]}
      aria-valuemax={range[1]}
      aria-valuenow={value}
      aria-valuetext={text}
      onKeyDown={press}
    />
  )
}

function ordered(a: number, b: number): Span {
  return a < b ? [a, b] : [b, a]
}

function clamp([first, last]: Span, count: number): Span {
  return [Math.min(first, count - 1), Math.min(last, count - 1)]
}
