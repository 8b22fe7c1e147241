import assert from "node:assert/strict"
import { test } from "node:test"
import { HttpSource } from "../src/source/http.ts"
import { Lost, Refusal } from "../src/source/source.ts"

/** A server that sends some lines, and then breaks off as a browser tells of it, or ends. */
function answering(lines: string[], breaks: boolean): HttpSource {
  const body = new ReadableStream<Uint8Array>({
    pull(stream) {
      const line = lines.shift()
      if (line !== undefined) stream.enqueue(new TextEncoder().encode(`${line}\n`))
      else if (breaks) stream.error(new TypeError("network error"))
      else stream.close()
    },
  })
  globalThis.fetch = async () => new Response(body)
  return new HttpSource("api/0")
}

const NEWS = '{"progress": 0.5, "doing": "reading layer 2"}'

test("a connection that breaks, or ends too early, is said in words", async () => {
  for (const breaks of [true, false])
    await assert.rejects(answering([NEWS], breaks).get("books", {}), (error: Error) => {
      assert.ok(error instanceof Lost)
      assert.match(error.message, /closed the connection before it had answered/)
      return true
    })
})

test("an error of the server is its own sentence", async () => {
  const source = answering([NEWS, '{"error": "encode cannot make an input of this text"}'], false)
  await assert.rejects(source.get("books", {}), (error: Error) => {
    assert.ok(error instanceof Refusal)
    return error.message === "encode cannot make an input of this text"
  })
})
