import { useEffect, useRef, useState } from "preact/hooks"
import type { ImageSize } from "../contract.ts"
import { imageQuery } from "../image.ts"

interface Props {
  size: ImageSize
  onQuery(query: string): void
}

interface Point {
  x: number
  y: number
}

/** A canvas of the run's size: drawn on with mouse, finger or pen, or with arrow keys and the space bar. */
export function Draw({ size, onQuery }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null)
  const [last, setLast] = useState<Point | null>(null)
  const [cursor, setCursor] = useState<Point>({ x: size.width / 2, y: size.height / 2 })
  const context = () => canvas.current!.getContext("2d", { willReadFrequently: true })!
  const clear = () => {
    context().fillStyle = "black"
    context().fillRect(0, 0, size.width, size.height)
  }
  useEffect(clear, [])

  const stroke = (from: Point, to: Point) => {
    const pen = context()
    pen.strokeStyle = "white"
    pen.lineCap = "round"
    pen.lineWidth = Math.max(1, size.width / 11)
    pen.beginPath()
    pen.moveTo(from.x, from.y)
    pen.lineTo(to.x, to.y + 0.01)
    pen.stroke()
  }
  const point = (event: PointerEvent): Point => {
    const { left, top, width, height } = canvas.current!.getBoundingClientRect()
    return {
      x: ((event.clientX - left) / width) * size.width,
      y: ((event.clientY - top) / height) * size.height,
    }
  }
  const down = (event: PointerEvent) => {
    canvas.current!.setPointerCapture(event.pointerId)
    stroke(point(event), point(event))
    setLast(point(event))
  }
  const move = (event: PointerEvent) => {
    if (!last) return
    stroke(last, point(event))
    setLast(point(event))
  }
  const press = (event: KeyboardEvent) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[
      event.key
    ]
    if (!step && event.key !== " ") return
    event.preventDefault()
    const next = { x: cursor.x + (step?.[0] ?? 0), y: cursor.y + (step?.[1] ?? 0) }
    if (event.shiftKey || !step) stroke(cursor, next)
    setCursor(next)
  }
  const ask = () => {
    const { data } = context().getImageData(0, 0, size.width, size.height)
    onQuery(imageQuery(data, size.channels))
  }
  return (
    <div class="draw">
      <canvas
        ref={canvas}
        width={size.width}
        height={size.height}
        tabIndex={0}
        role="img"
        aria-label="A canvas to draw on. The space bar makes a dot; arrow keys move, with shift they draw."
        onPointerDown={down}
        onPointerMove={move}
        onPointerUp={() => setLast(null)}
        onPointerCancel={() => setLast(null)}
        onKeyDown={press}
        data-testid="canvas"
      />
      <div class="buttons">
        <button type="button" class="primary" onClick={ask} data-testid="ask-drawn">
          Ask about this drawing
        </button>
        <button type="button" class="quiet" onClick={clear}>
          Start over
        </button>
      </div>
    </div>
  )
}
