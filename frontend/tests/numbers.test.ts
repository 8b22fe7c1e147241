import assert from "node:assert/strict"
import { test } from "node:test"
import { suspectsCsv } from "../src/csv.ts"
import { raw } from "../src/image.ts"
import { bytes, count, percent, Scale, tiny } from "../src/numbers.ts"
import { brief } from "../src/words.ts"

test("numbers of one place are alike, and signs are written", () => {
  const scale = new Scale([7.4131, -0.25])
  assert.equal(scale.signed(7.4131), "+7.41")
  assert.equal(scale.signed(-0.25), "−0.25")
  assert.equal(scale.plain(0), "0.00")
})

test("what would look like zero and is not, is a power of ten", () => {
  assert.equal(new Scale([7]).signed(-8e-8), "−8e−8")
})

test("very large and very small ones are powers too", () => {
  assert.equal(new Scale([1.5e9]).plain(1.5e9), "1.50e9")
  assert.equal(new Scale([3e-6]).plain(3e-6), "3.00e−6")
  assert.equal(new Scale([]).plain(0), "0.00")
})

test("thousands are parted", () => {
  assert.equal(count(1234567), "1,234,567")
  assert.equal(new Scale([12345.6]).signed(12345.6), "+12,346")
})

test("sizes and errors", () => {
  assert.equal(bytes(22_500_000), "22.5 MB")
  assert.equal(bytes(12), "12 bytes")
  assert.equal(tiny(0), "0")
  assert.equal(tiny(2.24e-7), "2.2e−7")
  assert.equal(tiny(null), "not measured")
})

test("only all of it is 100 %, and only nothing is 0 %", () => {
  assert.deepEqual([0, 1e-9, 0.6339, 0.99999, 1].map(percent), [
    "0 %",
    "0.1 %",
    "63.4 %",
    "99.9 %",
    "100 %",
  ])
  assert.equal(percent(null), "not measured")
})

test("a table's fields are quoted where they must be", () => {
  const sample = { id: 'a"b', label: "x,y", value: 0.5, preview: null }
  assert.equal(suspectsCsv([sample]), 'id,label,suspicion\r\n"a""b","x,y",0.5\r\n')
})

test("pixels become the channels of a run", () => {
  const pixels = Uint8ClampedArray.from([255, 0, 0, 255, 255, 255, 255, 0])
  assert.deepEqual([...raw(pixels, 1)], [76, 0])
  assert.deepEqual([...raw(pixels, 3)], [255, 0, 0, 0, 0, 0])
})

test("a long id keeps its ends", () => {
  assert.equal(brief(123456), "123456")
  assert.equal(brief("a".repeat(24)), "a".repeat(24))
  assert.equal(brief("/data/shard-00019/image-000019129.jpeg"), "/data/sh…-000019129.jpeg")
})

test("a small amount beside a large one is written out", () => {
  const scale = new Scale([107.2, 0.0612])
  assert.equal(scale.signed(107.2), "+107")
  assert.equal(scale.signed(0.0612), "+0.06")
  assert.equal(scale.signed(-0.4), "−0.4")
  assert.equal(scale.plain(0.00096), "0.001")
  assert.equal(scale.plain(0.00004), "4e−5")
})
