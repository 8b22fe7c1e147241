// What a report computes from its cells, against plain loops.
import assert from "node:assert/strict"
import { test } from "node:test"
import { amounts, decode, evenly, grouped, ranked, timeline, total } from "../src/source/cells.ts"
import { random } from "./random.ts"

const SAMPLES = 300
const BINS = 7

function anyCells() {
  const r = random(3)
  const values = Float32Array.from({ length: SAMPLES * BINS }, () => r.next() - 0.5)
  const labels = Array.from({ length: SAMPLES }, () => r.of(["a", "b", 3, null]))
  return { values, labels }
}

function looped(values: Float32Array, first: number, last: number): number[] {
  const sums: number[] = []
  for (let i = 0; i < SAMPLES; i++) {
    sums[i] = 0
    for (let bin = first; bin <= last; bin++) sums[i]! += values[i * BINS + bin]!
  }
  return sums
}

test("base64 is read as it was written", () => {
  const { values } = anyCells()
  const cells = decode(Buffer.from(values.buffer).toString("base64"), SAMPLES)
  assert.deepEqual(cells, { values, bins: BINS })
})

test("a span's amounts are sums over its bins, and spans that meet add up", () => {
  const { values } = anyCells()
  const cells = { values, bins: BINS }
  assert.deepEqual(amounts(cells, [2, 4]), looped(values, 2, 4))
  assert.deepEqual(amounts(cells, null), looped(values, 0, BINS - 1))
  const [left, right] = [amounts(cells, [0, 2]), amounts(cells, [3, BINS - 1])]
  amounts(cells, null).forEach((all, i) => {
    assert.ok(Math.abs(all - left[i]! - right[i]!) < 1e-12)
  })
})

test("the timeline and the samples have the same sum", () => {
  const { values } = anyCells()
  const cells = { values, bins: BINS }
  assert.ok(Math.abs(total(timeline(cells)) - total(amounts(cells, null))) < 1e-9)
})

test("the sides are ordered, and part the samples that are not zero", () => {
  const values = [0, 2, -1, 2, 0, -3]
  assert.deepEqual(
    ranked(values, "for").map((one) => one.index),
    [1, 3],
  )
  assert.deepEqual(
    ranked(values, "against").map((one) => one.index),
    [5, 2],
  )
})

test("groups part the whole, on either side", () => {
  const { values, labels } = anyCells()
  const sums = amounts({ values, bins: BINS }, null)
  const groups = grouped(sums, labels)
  assert.deepEqual(
    groups.map((group) => group.label),
    [3, "a", "b", null],
  )
  assert.equal(total(groups.map((group) => group.count)), SAMPLES)
  assert.ok(Math.abs(total(groups.map((group) => group.sum)) - total(sums)) < 1e-9)
  for (const group of groups) {
    assert.ok(Math.abs(group.for + group.against - group.sum) < 1e-9)
    assert.deepEqual(
      group.curve,
      [...group.curve].sort((a, b) => b - a),
    )
  }
})

test("evenly taken points keep both ends", () => {
  const values = Array.from({ length: 1001 }, (_, i) => i)
  const taken = evenly(values, 120)
  assert.equal(taken.length, 120)
  assert.deepEqual([taken[0], taken.at(-1)], [0, 1000])
  assert.deepEqual(evenly([1, 2], 120), [1, 2])
})
