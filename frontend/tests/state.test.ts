// The written form of a state is the state: a law, tried on random ones.
import assert from "node:assert/strict"
import { test } from "node:test"
import { type Asked, fromHash, NOTHING_ASKED, START, type State, toHash } from "../src/state.ts"
import { random } from "./random.ts"

const TEXTS = ["", "0", "12", "sample:a b", "text:</script>&=#?%", "image:_-A", "ünï + code", "1-2"]

function anyAsked(r: ReturnType<typeof random>): Asked {
  const first = r.below(5)
  return {
    run: r.below(2),
    query: r.of(TEXTS),
    ask: r.of(["layer", "network", "removed", "keys"] as const),
    layer: r.of([null, "0", "block.1/attn", "conv@2"]),
    output: r.of([null, 0, 7]),
    place: r.of([null, 0, 63]),
    span: r.of([null, [first, first + r.below(4)] as const]),
    at: r.of([null, 0, 5]),
    by: r.of([null, "source", "a b"]),
    label: r.of([null, ...TEXTS]),
  }
}

function anyState(r: ReturnType<typeof random>): State {
  return {
    page: r.of(["query", "sample", "suspects", "books", "compare"] as const),
    asked: anyAsked(r),
    other: anyAsked(r),
    sample: r.of([null, ...TEXTS]),
    acting: r.of([null, ...TEXTS]),
    all: r.of([null, "for", "against"] as const),
    pane: r.of(["asked", "other"] as const),
    ticked: [...new Set([r.of(TEXTS), r.of(TEXTS)])],
    theme: r.of(["auto", "light", "dark"] as const),
  }
}

test("a state is what its hash says", () => {
  const r = random(1)
  for (let i = 0; i < 500; i++) {
    const state = anyState(r)
    assert.deepEqual(fromHash(toHash(state)), state)
  }
})

test("nothing chosen is written short", () => {
  assert.equal(toHash(START), "#/query")
  assert.deepEqual(fromHash(""), START)
})

test("what cannot be understood is left at its default", () => {
  const state = fromHash("#/elsewhere?ask=why&output=-1&span=5-2&place=x&theme=pink&run=1e3")
  assert.deepEqual(state.asked, NOTHING_ASKED)
  assert.deepEqual(state, START)
})
